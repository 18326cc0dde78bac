"""`rabo bench`: what is measured, and where it goes."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from rabo.bench import BENCHMARKS, Setting
from rabo.bench.machine import measure_machine
from rabo.errors import lookup
from rabo.runs.options import choose_device
from rabo.runs.terminal import console, guarded

ALL = "all"


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(BENCHMARKS)}, or {ALL}")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    repeats: Annotated[int | None, typer.Option(min=1, help="turns of each contestant")] = None,
    threads: Annotated[int, typer.Option(min=1, help="threads on a CPU")] = 1,
    backbone: Annotated[str, typer.Option(help="conv4 or resnet12 (rounds, runtimes)")] = "conv4",
    channels: Annotated[str, typer.Option(help="widths of the backbone, as in few-shot")] = "",
    policy: Annotated[
        str, typer.Option(help="importance (cuts are shared) or random (clients)")
    ] = "importance",
    clients: Annotated[
        int, typer.Option(min=10, help="most clients (clients: 10, 100, 1000, 10000)")
    ] = 10_000,
    quick: Annotated[bool, typer.Option("--quick", help="tiny problems: see that it runs")] = False,
    out: Annotated[Path, typer.Option(help="folder of the JSON files")] = Path("runs/bench"),
) -> None:
    """Measure what things cost, as ratios of times taken in turn."""

    def work() -> None:
        chosen = names or [ALL]
        for name in chosen:
            lookup("benchmark", name, {**BENCHMARKS, ALL: None})
        setting = Setting(
            choose_device(device), repeats, threads, quick, backbone, channels, policy, clients
        )
        torch.set_num_threads(threads)
        machine = measure_machine(setting)
        facts = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in machine.facts.items()
        )
        _say(", ".join(facts))
        for name, benchmark in BENCHMARKS.items():
            if name in chosen or ALL in chosen:
                length = "" if quick else f" (about {benchmark.minutes} min of one core)"
                _say(f"\n{name}{length}\n")
                finding = benchmark.measure(setting, machine)
                if quick:  # limits are for full sizes
                    finding = finding._replace(targets=())
                _say(finding.text())
                about = {"benchmark": name, "machine": machine.facts, "setting": setting._asdict()}
                finding.write(out / f"{name}.json", about)
        if quick:
            _say("\ntiny problems: these times say nothing but that all runs")
        _say(f"\nJSON: {out}")

    guarded(work, out)


def _say(text: str) -> None:
    """Print a table as it is, however narrow the terminal."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
