"""One L2 penalty per feature of a regression, learned by clients that share no data."""

import torch

import rabo

NUM_CLIENTS, NUM_ROWS, NUM_FEATURES, ROUNDS = 4, 15, 20, 100
generator = torch.Generator().manual_seed(0)
truth = torch.zeros(NUM_FEATURES)
truth[:4] = torch.tensor([3.0, -2.0, 1.5, 1.0])  # the other sixteen features are noise


def draw(num_rows):
    rows = torch.randn(num_rows, NUM_FEATURES, generator=generator)
    return rows, rows @ truth + torch.randn(num_rows, generator=generator)


def error(y, data):
    return (data[0] @ y["w"] - data[1]).square().mean()


def train(x, y, data):  # g: least squares, with a penalty of exp(x_j) on weight j
    return error(y, data) + (x["log_penalty"].exp() * y["w"].square()).sum()


def valid(x, y, data):  # f: how well that y does on data it was not fitted to
    return error(y, data)


start = torch.full((NUM_FEATURES,), -3.0)
problem = rabo.Problem(
    inner=train, outer=valid, x={"log_penalty": start}, y={"w": torch.zeros(NUM_FEATURES)}
)
data = [(draw(NUM_ROWS), draw(4 * NUM_ROWS)) for _ in range(NUM_CLIENTS)]
clients = [rabo.Client(problem.on(inner=own, outer=other)) for own, other in data]
result = rabo.solve(
    clients,
    rounds=ROUNDS,
    alpha=rabo.Cosine(0.1, ROUNDS),  # of Adam: how far each log penalty moves in a round
    num_inner_steps=1,  # several steps between two averages would pull y to each client's own data
    hessian="global",  # 15 rows of 20 features: no client's own Hessian stands for that of all
    hypergradient=rabo.ConjugateGradient(num_iterations=5),
)


def ridge(log_penalty):
    """Solve the inner problem of all clients at once: (mean AᵀA/m + diag eˣ) w = mean Aᵀb/m."""
    gram = sum(rows.T @ rows for (rows, _), _ in data) / (NUM_CLIENTS * NUM_ROWS)
    right = sum(rows.T @ target for (rows, target), _ in data) / (NUM_CLIENTS * NUM_ROWS)
    return torch.linalg.solve(gram + log_penalty.exp().diag(), right)


test = draw(10_000)
singles = [ridge(torch.full((NUM_FEATURES,), value)) for value in torch.arange(-8.0, 1.0, 0.5)]
errors = {
    "at the start": float(error({"w": ridge(start)}, test)),
    "best single penalty": min(float(error({"w": w}, test)) for w in singles),
    "tuned": float(error(result.y, test)),
}
penalties = result.x["log_penalty"].exp()
gap = float((result.y["w"] - ridge(result.x["log_penalty"])).norm() / result.y["w"].norm())
print("error on new data:", *(f"{name} {value:.2f}" for name, value in errors.items()))
print(
    f"mean penalty: {penalties[:4].mean():.3f} on what matters, {penalties[4:].mean():.2f} on noise"
)
print(f"y is the ridge solution over all clients under these penalties, to {gap:.0e}")
