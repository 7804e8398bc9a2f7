"""Where a case runs: values are drawn on the CPU and go to the device, results come back; a GPU that is not there is never green."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import tpverify as tpv
from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.device import checked_device, on_cpu, on_device
from tpverify.errors import CaseError, NoDevice
from tpverify.logical import draw, leaves_of
from tpverify.lookup import builtin_subjects
from tpverify.options import CUDA
from tpverify.rank_program import Calls
from tpverify.session import Session
from tpverify.simulator import rank_state
from tpverify.simulator.world import run_world
from tpverify.verification import typical_case

GPT = builtin_subjects()["gpt"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_nccl_is_about_gpus_and_every_other_world_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [checked_device("cpu", world) for world in ("simulator", "gloo")] == ["cpu", "cpu"]
    with pytest.raises(CaseError, match="Expected one of cpu, cuda but got device='tpu'"):
        checked_device("tpu", "simulator")
    for device, world, words in (("cuda", "simulator", "device='cpu' runs the same"), ("cpu", "nccl", "the simulator and gloo run")):
        with pytest.raises(NoDevice, match=f"Expected a GPU that torch can use but got none for .*: {words}"):
            checked_device(device, world)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [checked_device(*asked) for asked in (("cpu", "nccl"), ("cuda", "gloo"))] == ["cuda", "cuda"]


def test_a_session_asks_for_its_device_first() -> None:
    with pytest.raises(NoDevice):
        tpv.verify(GPT, device=CUDA)
    with pytest.raises(NoDevice):
        tpv.check_case(GPT, typical_case(GPT, 2), device=CUDA)


def test_property_tests_take_the_device_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPVERIFY_DEVICE", "cuda")
    with pytest.raises(NoDevice):
        tpv.property_test(GPT)


def test_the_command_line_without_the_gpu_it_was_asked_for_ends_with_5_and_one_document() -> None:
    done = CliRunner().invoke(main, ["verify", "gpt", "bert", "--device", "cuda", "--json"])
    assert done.exit_code == ExitCode.NOTHING_CHECKED
    document = json.loads(done.stdout)
    assert document["passed"] is False and [error["kind"] for error in document["errors"]] == ["unavailable"]
    assert done.stderr.count("Expected a GPU") == 1
    replayed = CliRunner().invoke(main, ["replay", repr(typical_case(GPT, 2)), "--device", "cuda"])
    assert replayed.exit_code == ExitCode.NOTHING_CHECKED and "Expected a GPU" in replayed.stderr


def test_pytest_is_not_green_without_the_gpu_it_was_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch, tpverify as tpv
        from tpverify.subjects.builtin import BUILTIN
        torch.cuda.is_available = lambda: False
        test_row = tpv.property_test(BUILTIN["row_parallel_linear"])
        """
    )
    done = pytester.runpytest_subprocess("--tpverify-device", "cuda", "-p", "no:cacheprovider")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*Expected a GPU that torch can use*"])


def test_values_are_the_same_for_every_device_and_modules_and_inputs_lie_on_it() -> None:
    # "meta" stands for a device that is not the CPU: it has no values, so what is drawn on it could not be compared.
    case = typical_case(GPT, 2)
    module = GPT.reference(case.config)
    here = draw(GPT, case, 0, module)
    with on_device("meta"):
        elsewhere = GPT.reference(case.config)
        drawn = draw(GPT, case, 0, elsewhere)
        leaves = leaves_of(GPT, case, drawn, rank=1)
        with on_cpu():
            assert torch.get_default_device().type == "cpu"
        assert torch.get_default_device().type == "meta"
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}
    assert all(leaf.device.type == "meta" for of_call in leaves for leaf in of_call.values())
    assert all(torch.equal(drawn.parameters[name], value) for name, value in here.parameters.items())
    assert all(torch.equal(drawn.inputs[0][name], value) for name, value in here.inputs[0].items())


def test_results_come_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.device] = []

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.device)
        return torch.zeros(tensor.shape, device="cpu")

    monkeypatch.setattr("tpverify.modules.on_host", on_host)
    case = typical_case(builtin_subjects()["row_parallel_linear"], 2)
    with on_device("meta"):
        module = torch.nn.Linear(2, 3, dtype=torch.float64)
        calls = Calls(module, [{"x": torch.zeros(1, 2, dtype=torch.float64)}], case.layout, traced=False)
        monkeypatch.setattr("tpverify.rank_program.random_state", lambda device: [])
        outputs = calls.forward(0)
        placement = tpv.Placement(tpv.Replicate())
        calls.backward(0, {label: torch.ones(1, 3, dtype=torch.float64) for label in outputs}, {"output": placement})
    assert calls.outputs["output"].local is not None and calls.outputs["output"].local.device.type == "cpu"
    assert {device.type for device in copied} == {"meta"}


def test_every_generator_of_the_device_belongs_to_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator().manual_seed(99)  # stands for the GPU's
    monkeypatch.setattr(rank_state, "generators", lambda device: (torch.default_generator, gpu))
    before = gpu.get_state()

    def program() -> list[float]:
        torch.distributed.init_process_group("gloo")
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand((), generator=gpu)))
            torch.distributed.barrier()
        return drawn

    _, results, failure = run_world(program, 3, args=(), seed=7, timeout=60.0, device=CUDA)
    assert failure is None
    expected = torch.Generator().manual_seed(7)
    assert results == [[float(torch.rand((), generator=expected)) for _ in range(3)]] * 3
    assert torch.equal(gpu.get_state(), before)


def test_a_session_on_the_cpu_runs_there() -> None:
    session = Session(GPT)
    assert session.device == "cpu" and session.world is None
