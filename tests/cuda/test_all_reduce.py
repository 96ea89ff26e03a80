"""The sum over ranks, one rank at a time: what the others send is there already."""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_device import Device, struct_of

NOTHING = 0xFFFFFFFF
SLOT = 6000


class Rank:
    """A rank whose others have sent `sent` [ranks, n]; buffers of all, of which its own has what came."""

    def __init__(self, device: Device, rank: int, sent: np.ndarray, came: bool = True) -> None:
        self.ranks, self.n = sent.shape
        self.rank, self.device = rank, device
        buffers = np.full((self.ranks, self.ranks, SLOT), NOTHING, np.uint32)
        if came:
            buffers[rank, :, : self.n] = sent.view(np.uint32)
            buffers[rank, rank] = NOTHING
        self.buffers = [device.put(buffer) for buffer in buffers]
        self.x = device.put(sent[rank])
        self.stop, self.late = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(1, np.uint32))

    def run(self, blocks: int, patience: int = 1 << 40) -> np.ndarray:
        slots = struct_of("AllReduceParams").slots
        for r, buffer in enumerate(self.buffers):
            slots[r] = buffer.address
        fields = {"n": self.n, "slot_values": SLOT, "patience": patience, "rank": self.rank, "ranks": self.ranks}
        self.device.kernel("all_reduce", "all_reduce")(
            blocks,
            128,
            "AllReduceParams",
            mine=self.buffers[self.rank],
            x=self.x,
            stop=self.stop,
            late=self.late,
            slots=slots,
            **fields,
        )
        return self.x.get()


def values(ranks: int, n: int) -> np.ndarray:
    source = np.random.default_rng(n)
    return (source.standard_normal((ranks, n)) * 10.0 ** source.uniform(-6, 6, (ranks, 1))).astype(np.float32)


@pytest.mark.parametrize("n", [4, 640, 5120])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 7])
def test_a_sum_is_that_of_the_ranks_in_order(device: Device, ranks: int, n: int, blocks: int) -> None:
    sent = values(ranks, n)
    expected = sent[0].copy()
    for r in range(1, ranks):
        expected += sent[r]
    for rank in (0, ranks - 1):
        mine = Rank(device, rank, sent)
        assert mine.run(blocks).tobytes() == expected.tobytes()
        assert mine.late.get()[0] == 0
        for r, buffer in enumerate(mine.buffers):
            left = buffer.get()
            if r != rank:  # what it sends to the others
                assert np.array_equal(left[rank, :n], sent[rank].view(np.uint32))
                left[rank, :n] = NOTHING
            assert (left == NOTHING).all()


def test_a_value_with_the_bits_of_nothing_arrives_as_another_nan(device: Device) -> None:
    sent = values(2, 8)
    sent[0, 3] = np.array([NOTHING], np.uint32).view(np.float32)[0]
    mine = Rank(device, 0, sent)
    assert np.isnan(mine.run(1)).tolist() == [False] * 3 + [True] + [False] * 4


@pytest.mark.parametrize("why", ["stopped", "impatient"])
def test_a_rank_that_is_alone_gives_up_and_says_so(device: Device, why: str) -> None:
    mine = Rank(device, 0, values(3, 640), came=False)
    if why == "stopped":
        mine.stop = device.put(np.ones(1, np.uint32))
    mine.run(2, patience=1 << 40 if why == "stopped" else 1000)
    assert mine.late.get()[0] == 1
