"""Data hyper-cleaning: learn whom to trust among the annotators of training labels.

x is one trust per annotator, shared by all clients; y is a classifier, cut to what clients hold.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import rabo

NUM_CLIENTS, NUM_ANNOTATORS, ROUNDS = 5, 8, 30
CARELESS = [1, 2, 4, 5, 6]  # their labels are drawn at random; nobody knows
generator = torch.Generator().manual_seed(0)
images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=generator)
images, labels = images.float()[order] / 16, labels[order]
test = images[1200:], labels[1200:]


def share(client):
    """200 images labelled by annotators, and 40 that somebody has checked."""
    own = slice(240 * client, 240 * client + 200)
    annotator = torch.randint(NUM_ANNOTATORS, (200,), generator=generator)
    guesses = torch.randint(10, (200,), generator=generator)
    is_careless = torch.isin(annotator, torch.tensor(CARELESS))
    given = torch.where(is_careless, guesses, labels[own])
    checked = slice(own.stop, own.stop + 40)
    return (images[own], given, annotator), (images[checked], labels[checked])


def scores(y, pixels):
    return pixels @ y["weight"] + y["bias"]


def train(x, y, data):  # g: every label counts as much as its annotator is trusted
    pixels, given, annotator = data
    losses = cross_entropy(scores(y, pixels), given, reduction="none")
    trust = x["trust"].sigmoid()[annotator]
    return (trust * losses).mean() + 0.002 * y["weight"].square().sum()


def valid(x, y, data):  # f: the checked labels
    return cross_entropy(scores(y, data[0]), data[1])


problem = rabo.Problem(
    inner=train,
    outer=valid,
    x={"trust": torch.zeros(NUM_ANNOTATORS)},
    y={"weight": torch.zeros(64, 10), "bias": torch.zeros(10)},
    axes={"y.weight": ("pixel", None)},  # a client of capacity 1/2 trains half of the pixels
)
capacities = (1, 1, 1, 1 / 2, 1 / 2)
clients = [
    rabo.Client(problem.on(inner=own, outer=checked), capacity)
    for (own, checked), capacity in zip(map(share, range(NUM_CLIENTS)), capacities, strict=True)
]
options = {"rounds": ROUNDS, "num_inner_steps": 10}
cleaned = rabo.solve(clients, **options, alpha=0.1)
as_given = rabo.solve(clients, **options, warm_up=ROUNDS)  # x never moves: all are trusted alike


def accuracy(result):
    guesses = scores(result.y, test[0]).argmax(dim=1)
    return float((guesses == test[1]).float().mean())


trust = cleaned.x["trust"].sigmoid()
accuracies = {"as given": accuracy(as_given), "cleaned": accuracy(cleaned)}
print("trust:", *(f"{float(value):.2f}" for value in trust))
print("accuracy on new images:", *(f"{name} {value:.1%}" for name, value in accuracies.items()))
