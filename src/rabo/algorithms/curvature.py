"""An exchange that measures how curved the clients' inner problems are."""

from rabo.algorithms.base import Cuts, State, spread
from rabo.curvature import lanczos
from rabo.hypergradients.linearisation import Difference, View, check_loss
from rabo.runtimes.base import Local, Reply, Runtime, Task, answers

NUM_PRODUCTS = 10


def largest_curvature(state: State, cuts: Cuts, runtime: Runtime, seed: int) -> float:
    """Return l_{g,1}: the largest that counts of those who answer, zero if nobody does."""
    x, y = cuts.extract("x", state.x), cuts.extract("y", state.y)
    tasks = (
        (client, Task(seed, state.round, cut, {"x": x(client), "y": y(client)}))
        for client, cut in cuts.items()
    )
    found = [
        reply.scalars["largest_curvature"] for _, reply in runtime.map(measure_curvature, tasks)
    ]
    return cuts.aggregate.largest(found) if found else 0.0


@answers(scalars=("largest_curvature", "smallest_curvature"))
def measure_curvature(task: Task, local: Local) -> Reply:
    """On the client: l_{g,1} and μ_g of its submodel, without second derivatives."""
    problem = local.problem
    batch = local.draw(task, "curvature")
    y = spread(task.arrays["y"], problem.copies)
    view = View(problem, task.arrays["x"], y, batch)
    check_loss("inner", view.inner(view.y))
    found = lanczos(Difference(view).product, view.y, NUM_PRODUCTS)
    return Reply({}, {"largest_curvature": found.largest, "smallest_curvature": found.smallest})
