"""An exchange that measures how curved the clients' inner problems are."""

from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import Cuts, State, spread
from rabo.exchange.work import Local, Reply, Runtime, Task, answers
from rabo.hypergradients.curvature import lanczos
from rabo.hypergradients.linearisation import Difference, View, check_loss

NUM_PRODUCTS = 10


def largest_curvature(state: State, cuts: Cuts, runtime: Runtime, seed: int) -> float:
    """Return l_{g,1}: the largest that counts of those who answer, zero if nobody does."""
    ask = Exchanges(state, cuts, runtime, seed)
    replies = ask.ask(measure_curvature, ask.parts_of({"x": state.x, "y": state.y}))
    found = [reply.scalars["largest_curvature"] for _, reply in replies]
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
