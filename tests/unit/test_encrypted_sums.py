"""Encrypted sums equal integer sums, for any number of ranks that fits; others, and other keys, are refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mycel.data_parallel import CompressionPolicy
from mycel.data_parallel.compress import AllReduce, Context, IntegerSum, Item, Outcome, Quantised, TopK
from mycel.data_parallel.compress.encrypted import Encrypted
from mycel.data_parallel.compress.sum_key import SLOTS, WORDS, SumKey
from mycel.errors import MissingExtraError, UsageError

pytest.importorskip("tenseal", reason="the extra encrypted is not installed")


@pytest.fixture(scope="module")
def key() -> SumKey:
    return SumKey.make()


def gradients(rank: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def talk(make: Callable[[int], IntegerSum], size: int, shapes: list[tuple[int, ...]]) -> tuple[Any, list[Any]]:
    """All ranks' conversations with each other in one process: outcomes by rank, and the sums that travelled."""
    talking = []
    for rank in range(size):
        items = [
            Item(tensor=t, context=Context(name=f"p{i}", rank=rank, world_size=size))
            for i, t in enumerate(gradients(rank, shapes))
        ]
        talking.append(make(rank).converse(items, keep_residual=True))
    answers: list[Any] = [None] * size
    sums: list[Any] = []
    while True:
        asked, ends = [], []
        for conversation, answer in zip(talking, answers, strict=True):
            try:
                asked.append(conversation.send(answer))
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert len(ends) == size
            return ends, sums
        assert all(isinstance(request, AllReduce) for request in asked)
        stacked = torch.stack([request.tensor for request in asked])
        total = stacked.sum(0) if asked[0].op == "sum" else stacked.max(0).values
        sums.append((asked[0].op, [request.tensor for request in asked], total))
        answers = [total.clone() for _ in range(size)]


def equal(found: list[Outcome], wanted: list[Outcome]) -> bool:
    return all(torch.equal(f.mean, w.mean) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_decrypted_sums_are_the_integer_sums(key: SumKey, bits: int, size: int) -> None:
    shapes: list[tuple[int, ...]] = [(33, 65), (7,), (), (0, 3)]
    plain, in_clear = talk(lambda _: IntegerSum(bits), size, shapes)
    sealed, under_way = talk(lambda _: Encrypted(IntegerSum(bits), key=key), size, shapes)
    for rank in range(size):
        assert equal(sealed[rank], plain[rank])
        assert equal(sealed[rank], sealed[0])
        residuals = zip(sealed[rank], plain[rank], strict=True)
        assert all(torch.equal(s.residual, p.residual) for s, p in residuals)  # type: ignore[arg-type]
    mean = torch.stack([gradients(r, shapes)[0] for r in range(size)]).mean(0)
    assert float((sealed[0][0].mean - mean).abs().max()) < 6.0 / ((1 << (bits - 1)) - 1)
    words = under_way[-1][2]
    assert words.dtype == torch.int64
    assert len(words) % WORDS == 0
    assert key.noise_bits_left(words.numpy()) > 0
    assert len(under_way) == 1 + len(in_clear)  # once, whether all have one key


def test_four_ranks_and_a_residual_that_is_what_was_lost(key: SumKey) -> None:
    shapes: list[tuple[int, ...]] = [(50, 50)]
    found, _ = talk(lambda _: Encrypted(Quantised(8), key=key), 4, shapes)
    exact = torch.stack([gradients(r, shapes)[0] for r in range(4)]).mean(0)
    lost = torch.stack([found[r][0].residual for r in range(4)]).mean(0)
    assert float((exact - lost - found[0][0].mean).abs().max()) < 1e-5


@pytest.mark.parametrize(("bits", "most"), [(16, 8.0), (8, 5.4), (4, 3.3)])
def test_bytes_are_as_the_formula_says(key: SumKey, bits: int, most: float) -> None:
    encrypted = Encrypted(IntegerSum(bits, bucket_size=8192), key=key)
    count = 20 * encrypted.per_word * SLOTS
    scales = 4 * -(-count // 8192)
    _, travelled = talk(lambda _: encrypted, 2, [(count,)])
    sent = sum(
        tensors[0].numel() * tensors[0].element_size() for op, tensors, _ in travelled if tensors[0].numel() != 2
    )
    assert sent == encrypted.wire_bytes((count,))
    assert sent - scales == 65536 * 20  # two elements of 4,096 words a ciphertext
    assert (sent - scales) / count <= most
    assert encrypted.sent_bytes([(count,)], rank=0, world_size=8) == 2 * 7 / 8 * sent


@pytest.mark.parametrize("bits", [2, 8])
def test_sums_at_the_limit_are_exact_and_beyond_it_refused(key: SumKey, bits: int) -> None:
    method = Encrypted(IntegerSum(bits, max_ranks=5), key=key)
    largest = (1 << (bits - 1)) - 1
    most = ((1 << method.field_bits) - 1) // (2 * largest)
    # What every rank sends where all values are the largest: fields are full, and none runs into the next.
    full = method._packed(torch.full((method.per_word * 10,), float(largest)))
    assert method._summed(full * most, method.per_word * 10, most).unique().tolist() == [most * largest]
    method.check_ranks(most)
    with pytest.raises(UsageError, match=f"give max_ranks={most + 1}"):
        method.check_ranks(most + 1)
    with pytest.raises(UsageError, match=r"bits need|smaller max_ranks"):
        Encrypted(IntegerSum(16, max_ranks=1 << 24), key=key)
    wide = Encrypted(IntegerSum(2, max_ranks=4096), key=key)
    wide.check_ranks(key.most_sums)
    with pytest.raises(UsageError, match="int64 holds sums of 512 words"):
        wide.check_ranks(513)


def test_five_hundred_and_twelve_ranks_leave_noise_to_spare(key: SumKey) -> None:
    """The most that int64 holds: ciphertexts of the largest slots, the same ones over and over."""
    slots = np.full(SLOTS, (1 << 38) // 512 - 1)
    several = [key.encrypt(slots) for _ in range(8)]
    total = sum(several[i % 8] for i in range(512))
    assert isinstance(total, np.ndarray)
    assert (key.decrypt(total) == 512 * slots).all()
    assert key.noise_bits_left(total) >= 1


def test_with_another_key_there_are_no_numbers(key: SumKey) -> None:
    other = SumKey.make()
    assert other.fingerprint != key.fingerprint
    with pytest.raises(UsageError, match="ranks have different keys"):
        talk(lambda rank: Encrypted(Quantised(8), key=other if rank == 1 else key), 3, [(50, 50)])
    with pytest.raises(UsageError, match="cannot be decrypted"):
        other.decrypt(key.encrypt(np.arange(SLOTS)))
    with pytest.raises(UsageError, match="cannot be decrypted"):
        key.decrypt(np.random.default_rng(0).integers(0, key.modulus, WORDS))


def test_numbers_that_are_none_are_not_encrypted(key: SumKey) -> None:
    bad = [torch.ones(3000), torch.ones(40, 50)]
    bad[1][0, 0] = float("nan")
    for rank in range(2):
        items = [
            Item(tensor=t if rank else torch.ones_like(t), context=Context(name=n, rank=rank, world_size=2))
            for n, t in zip(("up.weight", "down.weight"), bad, strict=True)
        ]
        conversation = Encrypted(Quantised(8), key=key).converse(items, keep_residual=False)
        request = next(conversation)
        request = conversation.send(request.tensor)
        scales = request.tensor.clone()
        scales[2] = torch.inf  # the largest over ranks: bucket 2 has values of both
        with pytest.raises(UsageError, match=f"up.weight or down.weight are not finite.*rank {rank}"):
            conversation.send(scales)
    clear = IntegerSum(8).converse(
        [Item(tensor=bad[1], context=Context(name="w", world_size=1))], keep_residual=False
    )
    with pytest.raises(StopIteration) as end:
        scales = next(clear).tensor
        clear.send(clear.send(scales).tensor)
    assert bool(end.value.value[0].mean.isnan().any())


def test_everything_goes_through_it(key: SumKey) -> None:
    policy = CompressionPolicy(Encrypted(Quantised(8), key=key))
    assert all(
        policy.choose(f"p{i}", shape, 0) is policy.default for i, shape in enumerate([(3,), (1, 1), (), (9, 9)])
    )
    with pytest.raises(UsageError, match="in the clear"):
        CompressionPolicy(Encrypted(Quantised(8), key=key), start_step=1)
    copied = copy.deepcopy(policy.default)
    assert isinstance(copied, Encrypted)
    assert copied.key is key


def test_keys_are_kept_in_files_of_ones_own(key: SumKey, tmp_path: Path) -> None:
    file = tmp_path / "key"
    key.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    again = SumKey.load(file)
    assert again.fingerprint == key.fingerprint
    assert again.decrypt(key.encrypt(np.arange(SLOTS)))[-1] == SLOTS - 1
    with pytest.raises(UsageError, match="File exists"):
        key.save(file)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        SumKey.load(file)
    with pytest.raises(UsageError, match="cannot be read"):
        Encrypted(Quantised(8), key=tmp_path / "none")
    with pytest.raises(UsageError, match="without a key"):
        Encrypted(Quantised(8), key=None)
    with pytest.raises(UsageError, match="cannot be added"):
        Encrypted(TopK(0.1), key=key)  # type: ignore[arg-type]
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    other.chmod(0o600)
    with pytest.raises(UsageError, match="not a SumKey"):
        SumKey.load(other)
    other.write_bytes(b"mycel sum key 1\n" + b"x" * 100)
    with pytest.raises(UsageError, match="not the secret"):
        SumKey.load(other)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(MissingExtraError, match=r"mycel\[encrypted\]"):
        SumKey.make()


def test_importing_needs_no_extra() -> None:
    code = "import mycel.data_parallel, sys; sys.exit('tenseal' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


#: A relay: reads as many numbers from each of two ranks, adds them, sends the sum back, and waits to be looked at.
_RELAY = """
import sys
import numpy as np
count = int(sys.argv[1])
total = np.zeros(count, np.int64)
for _ in range(2):
    total += np.frombuffer(sys.stdin.buffer.read(8 * count), np.int64)
sys.stdout.buffer.write(total.tobytes())
sys.stdout.buffer.flush()
sys.stdin.buffer.read(1)
"""


def memory_of(process: subprocess.Popen[bytes]) -> list[bytes]:
    """All that a process may write to."""
    found = []
    regions = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
        for line in regions:
            place, rights, *_ = line.split()
            if "w" not in rights or "[v" in line:
                continue
            begin, end = (int(number, 16) for number in place.split("-"))
            try:
                memory.seek(begin)
                found.append(memory.read(end - begin))
            except OSError:
                continue
    return found


@pytest.mark.skipif(not os.access("/proc/self/mem", os.R_OK), reason="memory of processes cannot be read here")
@pytest.mark.parametrize("sealed", [True, False])
def test_a_relay_holds_no_plaintext(key: SumKey, sealed: bool) -> None:
    """What adds on the way is another process, whose memory is searched; in the clear, it is found there."""
    method = Encrypted(Quantised(8), key=key)
    packed = [method._packed(torch.randint(-127, 128, (12288,)).float()) for _ in range(2)]
    sent = [method._seal(numbers) if sealed else numbers for numbers in packed]
    count = len(sent[0])
    command = [sys.executable, "-c", _RELAY, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        try:
            for words in sent:
                relay.stdin.write(words.numpy().tobytes())
            relay.stdin.flush()
            total = torch.frombuffer(bytearray(relay.stdout.read(8 * count)), dtype=torch.int64)
            regions = memory_of(relay)
        finally:
            relay.stdin.close()
            relay.wait(30)
    sums = packed[0] + packed[1]
    opened = method._open(total, 12288, world_size=2) if sealed else total
    assert torch.equal(opened, sums)
    assert sum(map(len, regions)) > 1 << 20
    # Pieces of what ranks brought and of the sum: 32 bytes do not come up by chance.
    wanted = [numbers[i : i + 4].numpy().tobytes() for numbers in (*packed, sums) for i in range(100, 4096, 1300)]
    held = any(piece in region for region in regions for piece in wanted)
    assert held is not sealed


def test_what_would_travel_in_the_clear_is_refused(key: SumKey) -> None:
    from mycel.data_parallel.ddp import _check_covered

    policy = CompressionPolicy(Encrypted(Quantised(8), key=key))

    class Wrapped:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    with pytest.raises(UsageError, match="sparse gradients"):
        _check_covered(Wrapped(nn.Sequential(nn.Embedding(3, 2, sparse=True))), policy)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="complex"):
        _check_covered(Wrapped(nn.Linear(2, 2, dtype=torch.complex64)), policy)  # type: ignore[arg-type]
    _check_covered(Wrapped(nn.Linear(2, 2)), policy)  # type: ignore[arg-type]
