"""Tensors that travel through lent device memory arrive as they were sent, and nothing beside them is read."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_device import FakeDevice

from kbx_env.device.driver import TensorMetadata
from kbx_env.device.ipc_grader import LEAST_BYTES, MOST_BYTES, IpcReceiver, claimed, mailbox_bytes
from kbx_env.device.ipc_runner import ALIGN, IpcSender, Result
from kbx_env.protocol import wire


def _ends(size: int) -> tuple[IpcReceiver, IpcSender, list[str]]:
    device = FakeDevice()
    box = IpcReceiver(device, size)
    return box, IpcSender(device, box.handle), []


def _ask(mail: IpcSender, asked: list[str]):
    def ask(header: dict) -> None:
        asked.append(header["do"])
        {"take": mail.take, "give": mail.give}[header.pop("do")](**header)

    return ask


@pytest.mark.parametrize("size", [ALIGN, 3 * ALIGN - 8, 1 << 16])
def test_inputs_arrive_with_their_layouts_in_as_many_pieces_as_it_takes(size: int) -> None:
    box, mail, asked = _ends(size)
    a = torch.randn(9, 30)[:, ::2]
    b = torch.arange(400, dtype=torch.int64)[7:]
    calls = [{"x": a, "n": 3, "y": b, "none": torch.empty(0, 4)}, {"x": a}]
    sent = box.send(calls, _ask(mail, asked))
    assert len(asked) == -(-(sum(-(-s // ALIGN) * ALIGN for s in (269 * 4, 393 * 8))) // size)
    assert sent[0]["n"] == 3 and sent[1]["x"] == sent[0]["x"]
    for name, value in (("x", a), ("y", b), ("none", calls[0]["none"])):
        got = mail.tensor(sent[0][name], "cpu")
        mail._driver.sync()
        assert torch.equal(got, value) and got.stride() == value.stride()


@pytest.mark.parametrize("size", [ALIGN, 1 << 16])
def test_results_arrive_with_what_is_pending_carried_out(size: int) -> None:
    box, mail, asked = _ends(size)
    x = torch.complex(torch.randn(50), torch.randn(50))
    rows = [x.conj(), x.imag.new_tensor([1.5, 2.5]), torch.tensor([True, False])]
    seen = [TensorMetadata(v) for v in rows]
    one = Result([(s, s.pointer) for s in seen] + ["list"], {}, {"a": seen[1]}, True)
    other = Result([(seen[1], seen[1].pointer)], {"w": (seen[2], seen[2].pointer)}, {"a": seen[1], "w": seen[2]}, False)
    (first, second), total, data = mail.claims([(one, True), (other, False)], "cpu", True)
    mail.give(0, min(box.size, total))
    whole = box.fetch(total, "cpu", _ask(mail, asked))
    assert len(asked) == -(-total // box.size) - 1, "the first window came with the reply"
    assert data == [] and first["outputs"][3] == {"k": "other", "type": "list"}
    for d, value in zip(first["outputs"], rows, strict=False):
        assert torch.equal(claimed(whole, d), value.resolve_conj())
    assert first["outputs"][1]["alias"] == "a" and torch.equal(claimed(whole, first["after"]["a"]), rows[1])
    assert torch.equal(claimed(whole, second["outputs"][0]), rows[1]) and not second["is_tuple"]
    assert list(second["after"]) == ["w"] and torch.equal(claimed(whole, second["after"]["w"]), rows[2])


@pytest.mark.parametrize(
    "change",
    [{"mail": -ALIGN}, {"mail": ALIGN}, {"mail": 8}, {"mail": "0"}, {"mail": None}, {"mail": True}, {"shape": [65]},
     {"dtype": "q"}, {"stride": [-1]}, {"stride": [1 << 40]}, {"shape": [1 << 40]}],
)  # fmt: skip
def test_a_claim_beside_what_was_sent_is_refused(change: dict) -> None:
    d = {"k": "tensor", "dtype": wire.NAMES[torch.float32], "shape": [64], "stride": [1], "mail": 0}
    assert claimed(torch.zeros(256, dtype=torch.uint8), d).shape == (64,)
    with pytest.raises(wire.WireError):
        claimed(torch.zeros(256, dtype=torch.uint8), d | change)


def test_lent_memory_holds_nothing_of_before() -> None:
    device = FakeDevice()
    box = IpcReceiver(device, 64)
    assert device.read(int.from_bytes(box.handle, "little"), 64) == bytes(64)
    box.close()
    box.close()
    assert device.held == {}


def test_what_one_thread_made_another_uses_and_closes() -> None:
    # A spare runner starts in a thread of its own; a grading that times nothing never uses CUDA before it closes.
    made: list[IpcReceiver] = []
    device = FakeDevice()
    device.threads.clear()
    thread = threading.Thread(target=lambda: made.append(IpcReceiver(device, ALIGN)))
    thread.start()
    thread.join()
    made[0].close()
    assert not device.held


@pytest.mark.parametrize("gb, mib", [(16, 128), (80, 149), (141, 256)])
def test_the_mailbox_grows_with_the_memory_of_the_device(gb: int, mib: int) -> None:
    size = mailbox_bytes(gb * 10**9)
    assert size // (1 << 20) == mib and size % ALIGN == 0 and LEAST_BYTES <= size <= MOST_BYTES
