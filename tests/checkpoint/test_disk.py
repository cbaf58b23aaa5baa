"""What a save asks of a file system: a file is there after a power cut where the file system can,
and its lock has the rights of the user's other files."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_distopt import distribute


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EIO])
def test_save_when_a_file_cannot_be_synced_then_only_an_error_of_the_disk_stops_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    model = torch.nn.Linear(2, 2)
    optimizer = distribute(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(os, "fsync", refuse)
    if code == errno.EIO:
        with pytest.raises(Exception, match="Input/output error"):
            optimizer.save(tmp_path)
    else:
        optimizer.save(tmp_path)
        optimizer.load(tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_lock_when_others_of_the_group_may_write_then_they_may_lock(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = distribute(model, torch.optim.AdamW(model.parameters()))
    before = os.umask(0o002)
    try:
        optimizer.save(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert dict.fromkeys(modes, 0o664) == modes


def test_import_when_the_system_has_no_fork_then_it_needs_none() -> None:
    program = "import os, torch; del os.register_at_fork; import megatron_distopt.comm.pending"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
