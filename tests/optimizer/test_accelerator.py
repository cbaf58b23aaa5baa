"""Who names the device, and which devices are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_distopt.device import mark
from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.optimizer.accelerator import Accelerator, check_devices, find_accelerator

FAKE_DEEPSPEED = """
class Xpu:
    def device_name(self):
        return "xpu"

def get_accelerator():
    return Xpu()
"""


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither installed nor loaded; what was loaded before is back afterwards."""
    loaded = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"
    }
    for name in loaded:
        del sys.modules[name]
    monkeypatch.setattr("megatron_distopt.optimizer.accelerator.find_spec", lambda name: None)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(loaded)


@pytest.fixture
def fake_deepspeed(
    without_deepspeed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A DeepSpeed on a machine with an XPU, the only one that can be found; returns the file of its
    accelerator."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text(FAKE_DEEPSPEED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_distopt.optimizer.accelerator.find_spec", find_spec)
    return package / "accelerator.py"


def torch_sees(
    device: torch.device | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_there: bool = True,
    has_cuda: bool = False,
) -> None:
    """As on a machine whose torch was compiled for the device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None and is_there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)


@pytest.mark.parametrize("choice", ["auto", "deepspeed"])
def test_find_accelerator_when_deepspeed_is_installed_then_it_names_the_device(
    choice: str, fake_deepspeed: Path
) -> None:
    assert find_accelerator(choice) == Accelerator("xpu", "deepspeed")


def test_find_accelerator_when_torch_is_chosen_then_deepspeed_is_not_even_imported(
    fake_deepspeed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_deepspeed.write_text("raise RuntimeError('imported')")
    torch_sees(None, monkeypatch)
    assert find_accelerator("torch") == Accelerator("cpu", "torch")
    assert "deepspeed" not in sys.modules
    with pytest.raises(RuntimeError, match=r"^imported$"):
        find_accelerator("deepspeed")


#: What torch says of an accelerator: the device that it was compiled for, whether it is there,
#: whether CUDA is; and the device type that follows.
OF_TORCH = [
    (None, True, False, "cpu"),
    (torch.device("xpu"), True, False, "xpu"),
    (torch.device("mps"), True, False, "mps"),
    (torch.device("cuda"), False, False, "cpu"),
    (None, True, True, "cuda"),
]


@pytest.mark.parametrize(("device", "is_there", "has_cuda", "name"), OF_TORCH)
def test_find_accelerator_when_deepspeed_is_absent_then_torch_names_the_device_that_is_there(
    device: torch.device | None,
    is_there: bool,
    has_cuda: bool,
    name: str,
    without_deepspeed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_sees(device, monkeypatch, is_there=is_there, has_cuda=has_cuda)
    assert find_accelerator() == find_accelerator("torch") == Accelerator(name, "torch")
    if device is None:  # as in a torch that does not know accelerators
        monkeypatch.delattr(torch, "accelerator")
        assert find_accelerator() == Accelerator(name, "torch")


def test_find_accelerator_when_deepspeed_is_asked_for_and_absent_then_refused(
    without_deepspeed: None,
) -> None:
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        find_accelerator("deepspeed")


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["cuda:0", "cpu"], "cpu, cuda:0"),
        (["cuda:0", "cuda:1"], "cuda:0, cuda:1"),
        ([], "no device"),
        (["meta"], "meta, but they must be on cuda or cpu, because deepspeed names cuda"),
        (["xpu:0"], "xpu:0, but they must be on cuda or cpu"),
    ],
)
def test_check_devices_when_mixed_or_foreign_then_refused(devices: list[str], text: str) -> None:
    with pytest.raises(LayoutError, match=rf"{text}.*Move the model"):
        check_devices({torch.device(name) for name in devices}, Accelerator("cuda", "deepspeed"))


class Queue:
    """Stands in for a stream of a device that torch.accelerator does not know, and for an event on
    it."""

    calls: list[str]

    def record_event(self) -> Queue:
        self.calls = ["record"]
        return self

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_mark_when_torch_knows_only_the_devices_module_then_it_waits_for_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = {torch.device("xpu:0"): Queue(), torch.device("xpu:1"): Queue()}
    monkeypatch.setattr(torch.xpu, "current_stream", queues.__getitem__)
    wait = mark(torch.device("xpu:1"))
    assert queues[torch.device("xpu:1")].calls == ["record"]
    wait()
    assert queues[torch.device("xpu:1")].calls == ["record", "synchronize"]
    mark(torch.device("cpu"))()
