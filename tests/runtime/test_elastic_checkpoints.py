"""Checkpoints of a job in one process: whole ones alone, in their order."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import moetune
from moetune.domain.errors import InputError, MoetuneError
from moetune.runtime.elastic import checkpoints as module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = (3, 2)


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(*SIZES)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step on random inputs, whose numbers go on from a checkpoint's."""
    optimizer.zero_grad()
    model(torch.randn(4, SIZES[0])).square().mean().backward()
    optimizer.step()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_job_goes_on_with_its_states_and_random_numbers(tmp_path: Path) -> None:
    model, optimizer = made()
    step(model, optimizer)
    job = moetune.Checkpoints(tmp_path / "job")
    assert job.newest() is None
    path = job.save(1, model, optimizer, {"epoch": 3})
    step(model, optimizer)
    other, fresh = made(seed=1)
    newest = moetune.Checkpoints(tmp_path / "job").newest()
    assert newest == moetune.Checkpoint(path=path, step=1, num_ranks=1, values={"epoch": 3})
    job.load(newest, other, fresh)
    step(other, fresh)
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_the_newest_stay_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    model, optimizer = made()
    job = moetune.Checkpoints(tmp_path)
    for number in (8, 9, 10, 100_000_000, 10):
        job.save(number, model, optimizer, {"at": number})
    assert names(tmp_path) == ["step-00000010", "step-100000000"]
    newest = job.newest()
    assert newest is not None
    assert newest.step == 100_000_000


@pytest.mark.parametrize("fault", ["in the file", "at the end"])
def test_what_was_half_written_is_not_gone_on_from(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    job = moetune.Checkpoints(tmp_path)
    job.save(1, model, optimizer)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((torch, "save") if fault == "in the file" else (module, "_finish")), full)
        with pytest.raises(MoetuneError, match="No space left"):
            job.save(2, model, optimizer)
    assert names(tmp_path) == [".step-00000002.writing", "step-00000001"]
    newest = job.newest()
    assert newest is not None
    assert newest.step == 1
    job.save(2, model, optimizer)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_files_of_another_folder_of_the_name_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    finish = module._finish

    def on_another_node(writing: Path, final: Path, keep: int) -> None:
        (writing / "__0_0.distcp").unlink()
        finish(writing, final, keep)

    monkeypatch.setattr(module, "_finish", on_another_node)
    with pytest.raises(MoetuneError, match=r"lacks __0_0\.distcp.*another folder"):
        moetune.Checkpoints(tmp_path).save(1, model, optimizer)
    assert moetune.Checkpoints(tmp_path).newest() is None


def test_mistakes_are_named(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(InputError, match="keep"):
        moetune.Checkpoints(tmp_path, keep=0)
    job = moetune.Checkpoints(tmp_path)
    with pytest.raises(InputError, match="step"):
        job.save(-1, model, optimizer)
    with pytest.raises(InputError, match="values cannot be written"):
        job.save(1, model, optimizer, {"x": object()})
    path = job.save(1, model, optimizer)
    newest = job.newest()
    assert newest is not None
    wider = nn.Linear(5, 5)
    with pytest.raises(MoetuneError, match=r"the reading of .*step-00000001 failed on rank 0"):
        job.load(newest, wider, torch.optim.AdamW(wider.parameters()))
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace("checkpoint/1", "checkpoint/2"))
    with pytest.raises(InputError, match="checkpoint/2"):
        job.newest()
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        job.newest()


def test_a_signal_asks_for_the_end_while_the_request_is_open() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with moetune.StopRequest() as stop:
        assert not stop.is_agreed()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_agreed()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_of_several_waits_for_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (moetune.StopRequest, lambda: moetune.Checkpoints(tmp_path)):
        with pytest.raises(InputError, match=r"no process group yet"):
            make()
