"""Charts of the clients that took part in each round."""

from collections.abc import Mapping, Sequence
from typing import Any

from rabo.runs.plots import BLUE, ORANGE, VERMILLION
from rabo.runs.report.figures import Chart, layout_over_rounds, thinned
from rabo.runs.report.runs import Run, mapping, number, text

MOST_CLIENTS = 60  # more clients are counted, not listed
MOST_CELLS = 500  # columns, one per round


def client_charts(run: Run) -> list[Chart]:
    """Draw the width of each client in each round, absences and answers that were not used."""
    rounds = [done for done in run.rounds if "present" in done]
    clients = sorted({c for done in rounds for c in (*_widths(done), *_sat_out(done))})
    if not clients:
        return []
    if len(clients) > MOST_CLIENTS:
        return [_attendance(rounds)]
    shown = thinned(rounds, MOST_CELLS)
    cells = [[_cell(done, client) for done in shown] for client in clients]
    faults = [(done["round"] + 1, client, why) for done in rounds for client, why in _faults(done)]
    data: list[Mapping[str, Any]] = [
        {
            "type": "heatmap",
            "x": [done["round"] + 1 for done in shown],
            "y": [str(client) for client in clients],
            "z": cells,
            "zmin": 0,
            "zmax": 1,
            "colorscale": [[0, VERMILLION], [0.001, "#cfe4f5"], [1, BLUE]],
            "colorbar": {"title": {"text": "width"}, "thickness": 12},
            "hovertemplate": "round %{x}, client %{y}: width %{z:.3g}<extra></extra>",
            "xgap": 1 if len(shown) <= 60 else 0,
            "ygap": 1,
        }
    ]
    if faults:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [round for round, _, _ in faults],
                "y": [str(client) for _, client, _ in faults],
                "text": [_short(why) for _, _, why in faults],
                "marker": {"symbol": "x", "size": 8, "color": ORANGE},
                "name": "answer not used",
                "hovertemplate": "round %{x}, client %{y}: %{text}<extra></extra>",
            }
        )
    every = "" if len(shown) == len(rounds) else f" {len(shown)} of {len(rounds)} rounds are shown."
    about = (
        "Blue: took part, darker for a wider submodel; vermillion: sat out; empty: not drawn; "
        f"cross: an answer was not used.{every}"
    )
    layout = layout_over_rounds(data[0]["x"], "client", y_type="category")
    layout["height"] = 180 + 14 * len(clients)
    return [Chart("who took part", about, data, layout)]


def sat_out(run: Run) -> list[tuple[str, str, int]]:
    """Return each client that was left out, the reason, and the number of rounds."""
    found: dict[tuple[str, str], int] = {}
    for done in run.rounds:
        reasons = [(f"client {c}", why) for c, why in _sat_out(done).items()]
        reasons += [(f"client {c}", f"answer not used: {why}") for c, why in _faults(done)]
        if text(done, "skipped"):
            reasons.append(("all", f"round given up: {text(done, 'skipped')}"))
        for reason in reasons:
            found[reason] = found.get(reason, 0) + 1
    return [(who, why, times) for (who, why), times in found.items()]


def _attendance(rounds: Sequence[Mapping[str, Any]]) -> Chart:
    counts = {
        ("took part", BLUE): _widths,
        ("sat out", VERMILLION): _sat_out,
        ("answers not used", ORANGE): _faults,
    }
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [done["round"] + 1 for done in rounds],
            "y": [len(of(done)) for done in rounds],
            "line": {"color": colour},
        }
        for (name, colour), of in counts.items()
    ]
    layout = layout_over_rounds(data[0]["x"], "clients")
    return Chart("who took part", "Numbers of clients in each round.", data, layout)


def _widths(done: Mapping[str, Any]) -> dict[int, float]:
    present = mapping(done, "present")
    return {int(c): number(present, c) or 0.0 for c in present if c.isdecimal()}


def _sat_out(done: Mapping[str, Any]) -> dict[int, str]:
    absent = mapping(done, "absent")
    return {int(c): text(absent, c) or "no reason on record" for c in absent if c.isdecimal()}


def _faults(done: Mapping[str, Any]) -> list[tuple[int, str]]:
    faults = done.get("faults")
    return [
        (fault["client"], text(fault, "why"))
        for fault in (faults if isinstance(faults, list) else ())
        if isinstance(fault, dict) and isinstance(fault.get("client"), int)
    ]


def _cell(done: Mapping[str, Any], client: int) -> float | None:
    return 0.0 if client in _sat_out(done) else _widths(done).get(client)


def _short(why: str) -> str:
    return why if len(why) <= 120 else f"{why[:119]}…"
