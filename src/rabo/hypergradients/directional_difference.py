"""Second-order-free hypergradient in two gradients (RAFBO's default)."""

from dataclasses import dataclass

from rabo.hypergradients.conjugate_gradient import ConjugateGradient
from rabo.hypergradients.linearisation import Products


@dataclass(frozen=True, kw_only=True)
class DirectionalDifference(ConjugateGradient):
    """∇_x f − [∇_x g(x, y + εv) − ∇_x g(x, y − εv)] / 2ε, v by CG on differences of ∇_y g.

    Departs from Algorithm 2, which takes one gradient per coordinate of x: the cross product for
    all coordinates at once costs two gradients, and is exact to O(ε²).
    """

    products: Products = "difference"
