"""Frames that consecutive items have in common are stored once, and every item is still whole."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from shmbuffer.memory import Engine, Schema, Settings, record_format
from shmbuffer.memory.format.record_batch import RecordBatch
from shmbuffer.numpy.records import shared_frames
from shmbuffer.numpy.records.compression import Zstd
from shmbuffer.numpy.records.shared_frames import REACH, are_held, find_equal
from shmbuffer.replay.records.decoder import Decoder
from shmbuffer.replay.records.encoder import Encoder
from tests.frames import film, transitions
from tests.replay.records.likeness import as_read

pytestmark = pytest.mark.product(few=4)


def read(batch: RecordBatch) -> list[Any]:
    return Decoder(Zstd().expand).items(as_read(batch))


def chunks_of(batch: RecordBatch) -> tuple[record_format.Chunk, ...]:
    (located,) = record_format.locate(as_read(batch), "here")
    return located.form.chunks


# -- equal pieces ------------------------------------------------------------------------------


class Memory:
    """Pieces of bytes, and where they are."""

    def __init__(self, rows: list[list[bytes]]) -> None:
        self.rows = rows
        self.arrays = [[np.frombuffer(piece + b"?", np.uint8) for piece in row] for row in rows]
        width = len(rows[0])
        at = [[array.ctypes.data for array in row] for row in self.arrays]
        self.addresses = np.array(at, np.int64).reshape(len(rows), width)
        sizes = [[len(piece) for piece in row] for row in rows]
        self.sizes = np.array(sizes, np.int64).reshape(len(rows), width)

    def find(self, reach: int = REACH) -> NDArray[np.int64]:
        return find_equal(self.addresses, self.sizes, reach)


def of(*rows: str) -> Memory:
    """A letter is a piece of eight of them."""
    return Memory([[letter.encode() * 8 for letter in row] for row in rows])


def test_the_last_row_that_has_a_piece_owns_it() -> None:
    found = of("abc", "bcd", "cde", "def").find()
    assert found.tolist() == [[0, 3, 6], [3, 6, 9], [6, 9, 10], [9, 10, 11]]
    assert are_held(found).sum() == len("abcdef")


def test_pieces_of_one_row_are_stored_once_in_it() -> None:
    found = of("aab", "ccc").find()
    assert found.tolist() == [[0, 0, 2], [3, 3, 3]]


def test_without_reach_rows_share_nothing_with_each_other() -> None:
    found = of("abc", "bcb").find(reach=0)
    assert found.tolist() == [[0, 1, 2], [3, 4, 3]]


def test_frames_needed_beyond_the_reach_are_stored_again() -> None:
    found = of(*"aaaaaaaaaaaaaaaaaaaaaaa").find(reach=8)
    assert found.ravel().tolist() == [4] * 5 + [13] * 9 + [22] * 9
    far = of("a", "b", "a").find(reach=1)
    assert far.ravel().tolist() == [0, 1, 2]


def test_pieces_of_different_sizes_are_different() -> None:
    memory = Memory([[b"aaaa", b"aa"], [b"aa", b"aaaa"], [b"", b""]])
    found = memory.find()
    assert found.tolist() == [[3, 2], [2, 3], [4, 5]]


def test_pieces_at_one_address_are_one() -> None:
    memory = of("a", "b")
    memory.addresses[1] = memory.addresses[0]
    assert memory.find().tolist() == [[1], [1]]


def test_no_pieces_have_no_holders() -> None:
    found = find_equal(np.zeros((3, 0), np.int64), np.zeros((3, 0), np.int64))
    assert found.shape == are_held(found).shape == (3, 0)


@pytest.mark.parametrize("honest", [True, False], ids=["checksums", "every checksum the same"])
@pytest.mark.parametrize("reach", [0, 1, 3, 8])
def test_an_equal_piece_within_reach_holds_the_bytes(
    reach: int, honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not honest:
        monkeypatch.setattr(shared_frames, "_core", Blind(shared_frames._core))
    chance = random.Random(reach)
    for _ in range(60):
        count, width = chance.randrange(1, 30), chance.randrange(1, 5)
        letters = "abcdefghijklmnop"[: chance.randrange(1, 17)]
        rows = ["".join(chance.choices(letters, k=width)) for _ in range(count)]
        memory = of(*rows)
        found = memory.find(reach)
        pieces = list(itertools.chain.from_iterable(memory.rows))
        for at, holder in enumerate(found.ravel().tolist()):
            assert pieces[holder] == pieces[at]
            assert 0 <= holder // width - at // width <= reach
            assert found.ravel()[holder] == holder
        if honest:
            assert are_held(found).sum() == fewest(rows, reach)


def fewest(rows: list[str], reach: int) -> int:
    """How often pieces have to be stored at least."""
    stored = 0
    for letter in set("".join(rows)):
        owner = len(rows) + reach
        for row in reversed(range(len(rows))):
            if letter in rows[row] and owner - row > reach:
                stored, owner = stored + 1, row
    return stored


class Blind:
    """The core, with a checksum that tells nothing apart."""

    def __init__(self, core: Any) -> None:
        self.same_pieces = core.same_pieces

    def checksum_pieces(self, _: int, nbytes: int, count: int, out: int) -> None:
        ctypes.memset(out, nbytes, 4 * count)


# -- frames of items ---------------------------------------------------------------------------


def stacks(count: int, stack: int = 4, side: int = 54, *, follow: bool = True) -> TensorDict:
    """Consecutive stacks of frames, and the next ones."""
    shown = torch.from_numpy(film(count + stack, seed=1)[:, 30 : 30 + side, :side].copy())
    obs = torch.stack([shown[at : at + stack] for at in range(count + 1)])
    data = {"obs": obs[:-1], "reward": torch.arange(count)}
    if follow:
        data["next"] = TensorDict({"obs": obs[1:]}, [count])
    return TensorDict(data, [count])


ENCODERS = {
    "raw": lambda: Encoder(share=True),
    "zstd": lambda: Encoder(zstd=Zstd(), share=True),
    "one leaf": lambda: Encoder(zstd=Zstd(), keys=[("next", "obs")], share=True),
}


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return ENCODERS[request.param]()


def check(encoder: Encoder, data: Any) -> RecordBatch:
    """Encodes a batch and compares each item with what is read of it."""
    batch = encoder.encode(data)
    items = list(data.unbind(0)) if isinstance(data, TensorDict) else data
    found = read(batch)
    assert len(found) == len(items)
    for one, other in zip(found, items, strict=True):
        assert one.batch_size == other.batch_size
        assert (one == other).all()
    return batch


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10, 40])
def test_stacks_come_back_exactly(encoder: Encoder, count: int) -> None:
    check(encoder, stacks(count))
    check(encoder, stacks(count, follow=False))


@pytest.mark.product(few=1)
def test_games_come_back_exactly_over_the_ends_of_episodes(encoder: Encoder) -> None:
    game = transitions(600, seed=2)
    assert game["next", "done"].sum() > 1
    game.rename_key_("observation", "obs")
    game["next"].rename_key_("observation", "obs")
    for start in range(0, 600, 60):
        check(encoder, game[start : start + 60])


def test_frames_that_repeat_cost_nearly_nothing() -> None:
    game = transitions(200, seed=3)
    single = game["observation"][:, 0].clone()
    zstd = Zstd()
    once = len(b"".join(zstd.compress([one.numpy().tobytes() for one in single])))
    shared = check(Encoder(zstd=zstd, share=True), game).data.nbytes
    apart = Encoder(zstd=zstd).encode(game).data.nbytes
    headers = 200 * 300  # header, form and numbers of a record
    assert shared - headers < 1.2 * once
    assert shared < 0.65 * apart


def test_stacks_are_cut_into_frames_and_images_are_not() -> None:
    encoder = Encoder(zstd=Zstd(), share=True)
    frames = [chunk.frames for chunk in chunks_of(encoder.encode(stacks(30)))]
    assert frames == [4, 0, 4]
    image = torch.from_numpy(film(31, seed=4)[..., None].repeat(3, -1))  # [31, 84, 84, 3]
    data = TensorDict({"obs": image[:-1], "next": TensorDict({"obs": image[1:]}, [30])}, [30])
    batch = check(Encoder(zstd=Zstd(), share=True), data)
    assert [(chunk.placed, chunk.frames) for chunk in chunks_of(batch)] == [(True, 0)] * 2
    assert batch.data.nbytes < 0.8 * Encoder(zstd=Zstd()).encode(data).data.nbytes


def test_bytes_that_items_do_not_share_stay_in_their_record(encoder: Encoder) -> None:
    noise = torch.randint(0, 256, (40, 4, 400), dtype=torch.uint8)
    data = TensorDict({"obs": noise[:20], "next": TensorDict({"obs": noise[20:]}, [20])}, [20])
    batch = check(encoder, data)
    assert not any(chunk.placed for chunk in chunks_of(batch))
    encoder.share = False
    encoder._plans.clear()
    assert batch.data.nbytes == encoder.encode(data).data.nbytes


def alone(encoder: Encoder, data: TensorDict) -> list[RecordBatch]:
    """Items that are added one by one, each compared with what is read of it."""
    batches = [encoder.encode(item, single=True) for item in data.unbind(0)]
    for batch, item in zip(batches, data.unbind(0), strict=True):
        (found,) = read(batch)
        assert (found == item).all()
    return batches


def test_stacks_that_are_added_one_by_one_share_the_frames_of_each() -> None:
    batches = alone(Encoder(share=True), stacks(80))
    assert [chunk.frames for chunk in chunks_of(batches[-1])] == [4, 0, 4]
    assert max(len(batch.data) for batch in batches) < 5.2 * 54 * 54


def test_frames_are_not_shared_where_zstd_does_better_without() -> None:
    # The frames of one stack: zstd finds what they have in common, and one frame costs it more.
    shared = sum(len(one.data) for one in alone(Encoder(zstd=Zstd(), share=True), stacks(80)))
    apart = sum(len(one.data) for one in alone(Encoder(zstd=Zstd()), stacks(80)))
    assert shared <= apart


def test_records_that_are_to_be_apart_do_not_overlap(encoder: Encoder) -> None:
    data = stacks(30)
    encoder.encode(data)
    batch = encoder.encode(data, apart=True)
    assert (batch.starts[1:] >= (batch.starts + batch.sizes)[:-1]).all()
    for one, other in zip(read(batch), data.unbind(0), strict=True):
        assert (one == other).all()


def test_records_reach_a_bounded_way_into_those_behind(encoder: Encoder) -> None:
    same = torch.zeros(100, 4, 500)
    data = TensorDict({"obs": same, "next": TensorDict({"obs": same}, [100])}, [100])
    batch = check(encoder, data)
    ends = batch.starts + batch.sizes
    limit = np.append(batch.starts, len(batch.data))
    last = np.minimum(np.arange(100) + REACH + 1, 100)
    assert (ends <= limit[last]).all()


def test_a_leaf_that_is_compressed_and_one_that_is_not_do_not_share() -> None:
    same = torch.arange(30 * 4 * 100, dtype=torch.int32).reshape(30, 4, 100) // 50
    data = TensorDict({"packed": same, "plain": same}, [30])
    encoder = Encoder(zstd=Zstd(), keys=["packed"], share=True)
    packed, plain = chunks_of(check(encoder, data))
    assert (packed.codec, plain.codec) == (record_format.Codec.ZSTD, record_format.Codec.RAW)


def test_leaves_that_share_are_compressed_all_or_none() -> None:
    # By themselves the frames of the first leaf would be compressed and those of the second not,
    # since it holds no frame of its own.
    shown = torch.from_numpy(film(34, seed=5)[:, :40, :40].copy())
    first = torch.stack([shown[at : at + 4] for at in range(30)])
    data = TensorDict({"first": first, "second": first.clone()}, [30])
    first, second = chunks_of(check(Encoder(zstd=Zstd(), share=True), data))
    assert first.codec == second.codec == record_format.Codec.ZSTD


def test_items_of_several_kinds_and_sizes_come_back_in_their_order(encoder: Encoder) -> None:
    data = stacks(30)
    mixed: list[Any] = []
    for at, item in enumerate(data.unbind(0)):
        mixed.append(item)
        if at % 7 == 3:
            mixed.append(item.select("obs"))
        if at % 5 == 1:
            item = item.clone()
            item["obs"] = item["obs"][:3].clone()
            mixed.append(item)
    encoder.encode(data)
    check(encoder, mixed)


def test_stacks_of_other_lengths_than_before_come_back(encoder: Encoder) -> None:
    check(encoder, stacks(30))
    check(encoder, stacks(10, stack=3))
    check(encoder, stacks(10))


def test_leaves_of_ever_new_shapes_are_looked_at_a_bounded_number_of_times() -> None:
    asked = []
    zstd = Zstd()

    class Counted(Zstd):
        def compress(self, pieces: Any) -> list[bytes]:
            asked.append(len(pieces))
            return zstd.compress(pieces)

    encoder = Encoder(zstd=Counted(), share=True)
    for length in range(100, 500):
        encoder.encode(torch.arange(length), single=True)
    assert len(asked) < 2 * 400


@pytest.mark.product(few=1)
def test_items_that_share_frames_come_back_from_a_ring_lap_after_lap(encoder: Encoder) -> None:
    capacity, nbytes = 64, 2**18  # in turn the slots and the bytes are what evicts
    engine = Engine.anonymous(Settings(capacity, record_bytes=nbytes))
    ring = engine.define(Schema((), capacity, (), {"kind": "records"}, record_bytes=nbytes))
    records, decoder = ring.records, Decoder(Zstd().expand)
    data, chance = stacks(600), random.Random(0)
    held: dict[int, TensorDict] = {}
    at = 0
    while at < 600:
        count = min(chance.choice([1, 3, 20]), 600 - at)
        ticket = records.write(encoder.encode(data[at : at + count]))
        for item in range(count):
            held[(ticket + item) % capacity] = data[at + item]
        at += count
        slot = chance.randrange(min(at, capacity))
        other = chance.randrange(600)
        records.place(np.array([slot]), encoder.encode([data[other]], apart=True), in_place=False)
        held[slot] = data[other]
        drawn = records.sample(8, at, beta=None)
        for index, item in zip(drawn.index.tolist(), decoder.items(drawn.batch), strict=True):
            assert (item == held[index]).all()
    assert engine.check().ok
    engine.close()


def test_a_changed_frame_is_not_taken_for_the_one_before() -> None:
    data = stacks(20)
    data["next", "obs"][7, 2, 5, 5] += 1
    data["obs"][3, 0, 0, 0] += 1
    check(Encoder(share=True), data)
