"""examples/03_gcn.py: the karate club from two labels, and graphs in files."""

import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest
from processes import python
from project import ROOT

import umem.chainer  # isort: skip
import chainer

from umem.graphs import karate_club, rmat, save_npz

SCRIPT = ROOT / "examples" / "03_gcn.py"
CPU = chainer.get_device("@numpy")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_gcn", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    return python(SCRIPT, *arguments, cwd=ROOT)


@pytest.mark.parametrize("seed", range(5))
def test_two_labelled_members_are_enough_for_nine_of_ten_others(example, seed):
    assert example.train(karate_club(), CPU, seed=seed) >= 0.9


@pytest.mark.slow
def test_nine_of_ten_others_are_found_from_every_one_of_100_seeds(example):
    assert min(example.train(karate_club(), CPU, seed=seed) for seed in range(100)) >= 0.9


@pytest.mark.thorough
def test_script_trains_on_the_cpu_if_asked():
    done = run("--device", "cpu")
    assert re.fullmatch(r"9\d\.\d% of the test nodes' labels found\n", done.stdout), done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(chainer.backends.cuda.available, reason="there is a CUDA device")
def test_script_trains_on_a_virtual_gpu_and_says_so():
    done = run()
    said, share = done.stdout.splitlines()
    assert said == (
        "The GPU is simulated (virtual:v100-16gb); the training is real, and runs on the CPU."
    )
    assert re.fullmatch(r"9\d\.\d% of the test nodes' labels found", share)


@pytest.mark.thorough
@pytest.mark.skipif(chainer.backends.cuda.available, reason="there is a CUDA device")
def test_script_asked_for_cuda_without_a_device_names_both_ways_out():
    done = run("--device", "cuda")
    assert done.returncode == 1
    assert "DeviceNotFoundError: no CUDA device" in done.stderr
    assert "umem.virtual_gpu" in done.stderr


@pytest.mark.gpu
def test_script_trains_on_a_cuda_device():
    assert re.fullmatch(r"9\d\.\d% of the test nodes' labels found\n", run().stdout)


def test_training_on_a_virtual_gpu_gives_the_same_labels_as_on_the_cpu(example):
    with umem.virtual_gpu("v100-16gb"), umem.managed():
        virtual = example.train(karate_club(), umem.chainer.device())
    assert virtual == example.train(karate_club(), CPU)


@pytest.mark.thorough
def test_script_trains_on_a_graph_in_a_file(tmp_path):
    save_npz(tmp_path / "graph.npz", rmat(200, 1000, 8, 3))
    done = run("--device", "cpu", "--data", tmp_path / "graph.npz")
    assert re.fullmatch(r"\d+\.\d% of the test nodes' labels found\n", done.stdout), done.stderr


@pytest.mark.thorough
def test_script_names_what_is_wrong_with_a_file(tmp_path):
    path = tmp_path / "graph.npz"
    path.write_bytes(b"not a graph")
    done = run("--device", "cpu", "--data", path)
    assert done.returncode == 1
    assert f"DataError: {path}: not an .npz file" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_script_refuses_a_graph_without_test_nodes(tmp_path):
    path = tmp_path / "graph.npz"
    save_npz(path, replace(karate_club(), test_mask=np.zeros(34, np.bool_)))
    done = run("--device", "cpu", "--data", path)
    assert done.returncode == 2
    assert done.stderr.endswith(f"{path}: test_mask: no node is for testing\n")


@pytest.mark.thorough
def test_script_refuses_an_unknown_device():
    done = run("--device", "tpu")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "--device must be virtual:NAME, cuda or cpu; got tpu",
    )
