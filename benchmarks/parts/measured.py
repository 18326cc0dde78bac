"""Run benchmarks that have `measure`, print their tables, and write them as JSON."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.catalogue import MEASURED, SCRIPTS
from benchmarks.parts.machine import Machine, measure_machine
from benchmarks.parts.timing import Setting
from rabo.errors import lookup
from rabo.runs.options import choose_device

ALL = "all"


def run(words: Sequence[str]) -> int:
    """Run the benchmarks that are named, in the order of the catalogue."""
    asked = parser().parse_args(words)
    for name in asked.names:
        lookup("benchmark", name, {**MEASURED, **SCRIPTS, ALL: None})
        if name in SCRIPTS:
            raise ValueError(f"{name} takes arguments of its own: run it alone")
    setting = setting_of(asked)
    torch.set_num_threads(setting.threads)
    machine = measure_machine(setting)
    print(
        ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in machine.facts.items()
        )
    )
    for name in MEASURED:
        if name in asked.names or ALL in asked.names:
            measure(name, setting, machine, asked.out)
    if setting.quick:
        print("\ntiny problems: their times mean nothing")
    print(f"\nJSON: {asked.out}")
    return 0


def measure(name: str, setting: Setting, machine: Machine, out: Path) -> None:
    """Run one benchmark."""
    length = "" if setting.quick else f" (about {MEASURED[name].minutes:g} min of one core)"
    print(f"\n{name}{length}\n", flush=True)
    finding = import_module(f"benchmarks.{name}").measure(setting, machine)
    if setting.quick:  # limits are for full sizes
        finding = finding._replace(targets=())
    print(finding.text(), flush=True)
    about = {"benchmark": name, "machine": machine.facts, "setting": setting._asdict()}
    finding.write(out / f"{name}.json", about)


def setting_of(asked: Namespace) -> Setting:
    chosen = {name: getattr(asked, name) for name in Setting._fields}
    return Setting(**{**chosen, "device": choose_device(asked.device)})


def parser() -> ArgumentParser:
    found = ArgumentParser(prog="python -m benchmarks", description=__doc__)
    found.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(MEASURED)}, or {ALL}")
    add = found.add_argument
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--repeats", type=at_least(1), help="turns of each contestant")
    add("--threads", type=at_least(1), default=1, help="threads on a CPU (default: 1)")
    add("--backbone", default="conv4", help="conv4 or resnet12, in rounds and runtimes")
    add("--channels", default="", help="widths of the backbone, as in few-shot")
    add("--policy", default="importance", help="of clients: importance (shared cuts) or random")
    add("--clients", type=at_least(10), default=10_000, help="largest number of clients")
    add("--quick", action="store_true", help="tiny problems, to see that everything runs")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the JSON files")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that refuses smaller ones."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
        return int(text)

    return number
