"""The paper's tables and figures, and studies beyond them: run, then collect."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rabo.errors import lookup
from rabo.reproduction.collect import collect
from rabo.reproduction.estimators import measure_estimators
from rabo.reproduction.grid import (
    TUNED,
    Changes,
    Grid,
    check_options,
    experiments_folder,
    known_grids,
    load_grid,
    part_of,
)
from rabo.reproduction.literal import register
from rabo.reproduction.sweep import missing_of, sweep

TUNING = "tuning"
ALL = "all"


def names() -> list[str]:
    """Return what can be reproduced."""
    return [*known_grids(), TUNING, ALL]


def expand(name: str) -> list[str]:
    """Return the experiments that a name stands for."""
    lookup("experiment", name, dict.fromkeys(names()))
    if name == TUNING:
        return [each for each in known_grids() if each.startswith(TUNING)]
    if name == ALL:
        return [each for each in known_grids() if not each.startswith(TUNING)]
    return [name]


def reproduce(
    name: str,
    out: Path,
    changes: Changes,
    *,
    tuned: Path | None = None,
    limit: float | None = None,
    part: tuple[int, int] = (1, 1),
    jobs: int = 1,
    only_collect: bool = False,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the runs that are missing, then write tables and figures; return how many are left.

    Of several experiments, one whose data are missing is left out.

    After `limit` seconds no run is begun; called again, it goes on. `part` is (k, n) where n
    machines share the runs, and none of them collects; `jobs` runs are under way at a time.
    Settings are read from, and by tuning written to, `tuned`; a tuning with other rounds or options
    is a trial and writes to `out`.
    """
    register()
    begun, left, left_out = clock(), 0, set[str]()  # folders: experiments share runs
    grids = _asked_for(name, changes, tuned)
    tuned = tuned or experiments_folder() / TUNED
    is_trial = changes.rounds is not None or bool(changes.task_options)
    for grid in grids:
        runs = [] if only_collect else part_of(grid.runs(changes), part)
        if missing := missing_of(runs, out):
            at_once = f", {min(jobs, len(missing))} at a time" if jobs > 1 else ""
            say(f"{grid.name}: {len(missing)} of {len(runs)} runs to do{at_once}, in {out}")
        remaining = None if limit is None else limit - (clock() - begun)
        try:
            if "estimators" in grid.content:
                left += measure_estimators(grid, runs, out, limit=remaining, say=say, clock=clock)
            else:
                left += sweep(runs, out, limit=remaining, jobs=jobs, say=say, clock=clock)
        except FileNotFoundError as error:
            if len(expand(name)) == 1:
                raise
            say(f"{grid.name}: left out: {error}")  # the others may have their data
            left_out |= {str(run.folder) for run in missing_of(runs, out)}
        if part[1] == 1:  # else others are still at it
            for line in collect(grid, out, out / TUNED if is_trial else tuned, changes):
                say(line)
    if left_out:
        say(f"runs that were left out, for their data are missing: {len(left_out)}")
    if left:
        say(f"{left} runs are left: give the same command again to go on")
    return left + len(left_out)


def _asked_for(name: str, changes: Changes, tuned: Path | None) -> list[Grid]:
    """Return the grids that a name stands for, if they can be done."""
    grids = [load_grid(each, tuned or experiments_folder() / TUNED) for each in expand(name)]
    if tuned and not tuned.exists() and not any("candidates" in g.content for g in grids):
        raise ValueError(f"tuned must be a file of settings that tuning has written, got {tuned}")
    some = grids[0].runs()[0].name
    grids = [grid for grid in grids if grid.runs(changes)]
    if not grids:
        raise ValueError(f"only must match some run, such as {some}, got {list(changes.only)}")
    for grid in grids:
        check_options(grid.runs(changes))
    return grids


__all__: Sequence[str] = ["Changes", "names", "reproduce"]
