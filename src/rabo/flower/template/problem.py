"""A problem of your own; to run it: `rabo flower up FOLDER problem.py`.

One ridge penalty per feature, learned so that the regression does well on validation data.
"""

import torch

import rabo


def train(x, y, data):
    """g: what y is fitted to."""
    penalty = (x["log_penalty"].exp() * y["w"] ** 2).sum()
    return ((data[0] @ y["w"] - data[1]) ** 2).mean() + penalty


def valid(x, y, data):
    """f: what x is for."""
    return ((data[0] @ y["w"] - data[1]) ** 2).mean()


def template():
    """The problem without data: all that the server sees of it."""
    return rabo.Problem(
        inner=train,
        outer=valid,
        x={"log_penalty": torch.zeros(8)},
        y={"w": torch.zeros(8)},
        axes={"x.log_penalty": ["feature"], "y.w": ["feature"]},
    ).on(inner=None, outer=None)


def problem(partition, num_partitions):
    """The problem on the data of one client: read your own here."""
    generator = torch.Generator().manual_seed(partition)
    features = torch.randn(60, 8, generator=generator)
    values = features @ torch.arange(8.0) + torch.randn(60, generator=generator)
    data = (features[:30], values[:30]), (features[30:], values[30:])
    return template().problem.on(inner=data[0], outer=data[1])
