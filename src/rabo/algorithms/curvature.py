"""An exchange that measures how curved the clients' inner problems are."""

from dataclasses import dataclass

from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import Cuts, State, spread
from rabo.exchange.work import Runtime, Work, levels
from rabo.hypergradients.curvature import lanczos
from rabo.hypergradients.linearisation import Difference, View, check_loss

NUM_PRODUCTS = 10


def largest_curvature(state: State, cuts: Cuts, runtime: Runtime, seed: int) -> float:
    """Return l_{g,1}: the largest that counts of those who answer, zero if nobody does."""
    ask = Exchanges(state, cuts, runtime, seed)
    here = ask.parts_of(MEASURE_CURVATURE, {"x": state.x, "y": state.y})
    replies = ask.send(MEASURE_CURVATURE, here)
    found = [reply.scalars["largest_curvature"] for reply in replies]
    return cuts.aggregate.largest(found) if found else 0.0


@dataclass(frozen=True)
class MeasureCurvature(Work):
    """On the client: l_{g,1} and μ_g of its submodel, without second derivatives."""

    name = "measure_curvature"
    takes = levels(x="x", y="y")
    answers = levels()
    numbers = ("largest_curvature", "smallest_curvature")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        problem = client.problem
        batch = client.draw(request, "curvature")
        y = spread(request.arrays["y"], problem.copies)
        view = View(problem, request.arrays["x"], y, batch)
        check_loss("inner", view.inner(view.y))
        found = lanczos(Difference(view).product, view.y, NUM_PRODUCTS)
        numbers = {"largest_curvature": found.largest, "smallest_curvature": found.smallest}
        return Answer({}, numbers)


MEASURE_CURVATURE = MeasureCurvature()
