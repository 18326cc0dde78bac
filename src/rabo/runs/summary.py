"""What a run ends with: what was reached, what it cost, and where it is."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rabo.federation.rounds import Result


def print_result(result: Result, folder: Path, console: Console) -> None:
    """Print a table, and how to see more."""
    print_rows(rows_of(result), folder, console)


def print_rows(rows: Sequence[Sequence[str]], folder: Path, console: Console) -> None:
    """Print rows of a name and a value, the run folder and the command for a report."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    command = f"rabo report {shlex.quote(str(folder))}"
    for name, value in {"run folder": str(folder), "as a page": command}.items():
        console.print(f"{name:25}{value}", markup=False, highlight=False, soft_wrap=True)


def rows_of(result: Result) -> list[tuple[str, str]]:
    """Return the result of a run as names and values."""
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in result.metrics.items()]
    cost = result.cost
    for name in ("multiply_adds", "bytes_up", "bytes_down"):
        share = result.relative_cost.get(name)  # empty if the clients did not measure it
        of_full = "" if share is None else f"  ({share:.1%} of the full model)"
        spent = f"{getattr(cost, name):,}{of_full}"
        rows.append((name.replace("multiply_adds", "multiply-adds").replace("_", " "), spent))
    rows.append(("peak memory of a client", f"{cost.peak_memory_bytes:,} bytes"))
    rows.append(("seconds on clients", f"{cost.seconds:.1f}"))
    for level in ("x", "y"):
        covered = f"C* = {result.coverage[f'{level}_min']}"
        trained = f"{result.coverage[f'{level}_trained']:.1%} of entries trained"
        rows.append((f"coverage of {level}", f"{covered}, {trained}"))
    absent = {client for done in result.history for client in done.absent}
    if absent:
        why = next(why for done in result.history for why in done.absent.values())
        rows.append(("sat out", f"clients {sorted(absent)} ({why})"))
    faults = [fault for done in result.history for fault in done.faults]
    if faults:
        who, last = sorted({fault.client for fault in faults}), faults[-1]
        why = f"the last in round {last.round + 1} at {last.phase}: {last.why}"
        rows.append(("answers not used", f"{len(faults)} of clients {who} ({why})"))
    skipped = [done for done in result.history if done.skipped]
    if skipped:
        why = f"the last is {skipped[-1].round + 1}: {skipped[-1].skipped}"
        rows.append(("rounds given up", f"{len(skipped)} ({why})"))
    return rows
