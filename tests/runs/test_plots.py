"""Figures: a method has one style everywhere, and several seeds become a mean with a band."""

import pytest

from rabo.algorithms import ALGORITHMS
from rabo.runs.plots import (
    COLOURS,
    DASHES,
    METHOD_STYLES,
    Band,
    Style,
    band_of,
    draw_band,
    new_figure,
    save,
    styles_of,
)


def test_every_algorithm_has_a_style_of_its_own():
    assert set(METHOD_STYLES) == set(ALGORITHMS)
    assert len(set(METHOD_STYLES.values())) == len(METHOD_STYLES)
    assert {style.colour for style in METHOD_STYLES.values()} <= set(COLOURS)
    assert {style.dash for style in METHOD_STYLES.values()} <= set(DASHES)


def test_a_method_keeps_its_colour_whatever_else_a_figure_shows():
    alone = styles_of({"a": "rabo"})["a"]
    methods = {"b": "fedmbo", "plain": "rabo", "other options": "rabo", "c": "simrabo"}
    beside = styles_of(methods)
    assert beside["plain"] == alone == METHOD_STYLES["rabo"]
    assert {beside[n].colour for n in ("plain", "other options", "c")} == {alone.colour}
    assert len(set(beside.values())) == 4
    unknown = styles_of({"x": "own"})["x"].colour
    assert styles_of({**methods, "x": "own"})["x"].colour == unknown


def test_a_band_is_the_mean_the_lowest_and_the_highest_of_each_round():
    curves = [{1: (10.0, 0.2), 2: (20.0, 0.4)}, {1: (30.0, 0.6)}]
    assert band_of(curves) == Band(x=[20, 20], mean=[0.4, 0.4], low=[0.2, 0.4], high=[0.6, 0.4])


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_equal_curves_are_equal_files(tmp_path, kind):
    pytest.importorskip("matplotlib")
    band = Band([1.0, 2.0], [0.5, 0.6], [0.4, 0.5], [0.6, 0.7])
    for name in ("a", "b"):
        figure, [panel] = new_figure(1)
        draw_band(panel, band, Style(COLOURS[0]), "rabo")
        save(figure, tmp_path / f"{name}.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
