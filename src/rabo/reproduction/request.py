"""What a command line may ask for, in words: options of both command lines."""

import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from rabo.errors import lookup
from rabo.reproduction import expand, names, reproduce
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.page import write_page
from rabo.runs.options import choose_device, parse_option
from rabo.tasks.data.cifar10 import load_cifar10
from rabo.tasks.data.omniglot import load_omniglot

DATA = "RABO_DATA"
DOWNLOADS: dict[str, Callable[..., Any]] = {"omniglot": load_omniglot, "cifar10": load_cifar10}
ELSEWHERE = """> Numbers, tables and verdicts are of the runs in this folder. Sentences around
> them, reasons and links are those of docs/results.md and of the runs of the repository.

"""
RUNS = ("summary.json", "study-estimators/seed-*.json")
PAGE, PAGE_PATH, COMMITTED = "page", Path("docs/results.md"), Path("results")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of `rabo reproduce`; every field is annotated with its help text."""

    name: str
    out: Annotated[
        Path | None, "folder of runs, tables and figures (runs/reproduce; page: results)"
    ] = None
    only: Annotated[
        Sequence[str], "run these alone: patterns of SETTING/METHOD/seed-N, such as '*/rabo*'"
    ] = field(default_factory=list)
    rounds: Annotated[int | None, "other rounds than the file says"] = None
    seeds: Annotated[int | None, "other number of seeds than the file says"] = None
    device: Annotated[str, "auto, cpu or cuda"] = "auto"
    data_root: Annotated[str | None, "folder of the data (else RABO_DATA, else the user cache)"] = (
        None
    )
    download: Annotated[bool, "download data that are missing"] = False
    option: Annotated[Sequence[str], "another option of the task: NAME=VALUE"] = field(
        default_factory=list
    )
    tuned: Annotated[Path | None, "file of tuned settings (experiments/tuned.json)"] = None
    limit: Annotated[float | None, "seconds after which no run is begun"] = None
    part: Annotated[str, "K/N: do the K-th of N parts, for N machines with one folder"] = "1/1"
    jobs: Annotated[int, "runs at a time, each in a process of its own"] = 1
    collect: Annotated[bool, "run nothing: write tables and figures of what there is"] = False

    @property
    def folder(self) -> Path:
        return self.out or Path("runs/reproduce")

    def perform(self, say: Callable[[str], None] = print) -> int:
        """Do what is asked; return 0, or 3 where runs are left."""
        if self.name == PAGE:
            if replace(self, out=None) != Request(name=PAGE):
                raise ValueError(
                    "page shows the runs that the experiments' files ask for and takes --out "
                    "alone; tables of other runs are beside them, in OUT/NAME/table.md"
                )
            folder = self.out or COMMITTED
            _check_holds_runs(folder)
            is_committed = folder.resolve() == COMMITTED.resolve()
            path = PAGE_PATH if is_committed else folder / "page.md"
            write_page(folder, path, "" if is_committed else ELSEWHERE)
            say(f"written: {path}")
            return 0
        lookup("experiment", self.name, dict.fromkeys([*names(), PAGE]))
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit must be at least 0, got {self.limit}")
        if self.collect:
            if self.only or self.seeds:
                raise ValueError("collect shows all runs there are: leave --only and --seeds out")
            _check_holds_runs(self.folder)
        else:
            choose_device(self.device)  # before any run is begun
        if self.data_root and not (self.download or Path(self.data_root).is_dir()):
            raise ValueError(
                f"data-root must be a folder, got {self.data_root}; --download makes it"
            )
        if self.data_root:
            os.environ[DATA] = self.data_root  # not an option of runs: it is no part of a result
        changes = Changes(
            rounds=self.rounds,
            seeds=self.seeds,
            device=self.device,
            task_options=dict(map(parse_option, self.option)),
            only=tuple(self.only),
        )
        if self.download:
            self._fetch(changes)
        left = reproduce(
            self.name,
            self.folder,
            changes,
            tuned=self.tuned,
            limit=self.limit,
            part=_part(self.part),
            jobs=self.jobs,
            only_collect=self.collect,
            say=say,
        )
        return 3 if left else 0

    def _fetch(self, changes: Changes) -> None:
        """Load once what runs need; not an option of theirs: it is no part of a result."""
        grids = [load_grid(each) for each in expand(self.name)]
        options = [run.experiment.task_options for grid in grids for run in grid.runs(changes)]
        for dataset in dict.fromkeys(each.get("dataset") for each in options):
            if dataset in DOWNLOADS:
                DOWNLOADS[dataset](download=True)

    @classmethod
    def declare(cls, parser: ArgumentParser) -> None:
        """Add all options to a parser."""
        parser.add_argument("name", help=known())
        for option, kind, default, text in options_of(cls):
            flag = f"--{option.replace('_', '-')}"
            if kind is bool:
                parser.add_argument(flag, action="store_true", help=text)
            elif default == []:
                parser.add_argument(flag, action="append", default=[], help=text)
            else:
                parser.add_argument(flag, type=kind, default=default, help=text)


def _check_holds_runs(folder: Path) -> None:
    if not any(any(folder.rglob(pattern)) for pattern in RUNS):
        raise ValueError(
            f"{folder} must hold runs, got none; name the folder of a reproduction (--out): "
            f"{COMMITTED} where the repository lies, or what it was run with"
        )


def known() -> str:
    """Return all that can be asked for, for a help text."""
    return ", ".join([*names(), PAGE])


def options_of(kind: Any) -> list[tuple[str, Any, Any, str]]:
    """Return name, type, default and help text of every option."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for each in fields(kind):
        if each.name == "name":
            continue
        plain, text = get_args(hints[each.name])[:2]
        made = next((t for t in get_args(plain) if t is not type(None)), plain)
        default = each.default if each.default is not MISSING else []
        found.append((each.name, made, default, text))
    return found


def _part(text: str) -> tuple[int, int]:
    k, slash, n = text.partition("/")
    if not (slash and k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise ValueError(f"part must be K/N with 1 <= K <= N, got {text!r}")
    return int(k), int(n)
