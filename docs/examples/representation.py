"""Hyper-representation: features under which a classifier fitted to few labels does well.

x is a backbone, y the classifier on top of it; clients hold as much of both as their capacity says.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import rabo

ROUNDS = 25
CAPACITIES = (1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4)
generator = torch.Generator().manual_seed(0)
images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=generator)
images, labels = images.float()[order] / 16, labels[order]
test = images[1200:], labels[1200:]


def features(x, data):  # computed once, reused by every inner step and Hessian product
    z = x(data[0])
    return z / z.square().sum(dim=1).mean().sqrt()  # of unit size: bounds the curvature of g


def train(z, y, data):  # g: a classifier with a weight penalty
    return cross_entropy(y(z), data[1]) + 0.0005 * y["weight"].square().sum()


def valid(z, y, data):  # f: the same classifier on other images
    return cross_entropy(y(z), data[1])


def layer():
    norm = nn.BatchNorm1d(64, track_running_stats=False)  # submodels use the batch's statistics
    return nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU())


torch.manual_seed(0)
backbone = nn.Sequential(layer(), layer())
head = nn.Linear(64, 10)
problem = rabo.Problem(
    inner=train, outer=valid, features=features, x=backbone, y=head, example=images[:8]
)


def share(client):
    """20 images to fit the classifier to, 180 to judge it by."""
    own = slice(200 * client, 200 * client + 20)
    others = slice(own.stop, own.stop + 180)
    return {"inner": (images[own], labels[own]), "outer": (images[others], labels[others])}


clients = [rabo.Client(problem.on(**share(i)), c) for i, c in enumerate(CAPACITIES)]
options = {"rounds": ROUNDS, "num_inner_steps": 20}
learned = rabo.solve(clients, **options)
random = rabo.solve(clients, **options, warm_up=ROUNDS)  # x never moves: random features


def accuracy(result):
    """Give new images to the exported modules, which are plain ones again."""
    result.export("trained")
    x = rabo.load_model("trained/x.safetensors", backbone)
    y = rabo.load_model("trained/y.safetensors", head)
    with torch.no_grad():
        guesses = y(features(x, test)).argmax(dim=1)
    return float((guesses == test[1]).float().mean())


accuracies = {"random features": accuracy(random), "learned": accuracy(learned)}
print("accuracy on new images:", *(f"{name} {value:.1%}" for name, value in accuracies.items()))
cost = learned.relative_cost
print(
    f"of the full model's work {cost['multiply_adds']:.0%}, of its traffic {cost['bytes_up']:.0%}"
)
