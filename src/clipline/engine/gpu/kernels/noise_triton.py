"""Triton kernels that draw standard normal numbers: random words, then NumPy's ziggurat in parallel.

NumPy draws one number after the other: where its first word is depends on how many words all numbers before it took.
Here every word is first looked at as if a number began there (`_spans`: how many words that attempt would take, and
whether it gives a number). Then the words are cut into segments, and one lane walks through each, from attempt to
attempt (`_counts`, then `_place`). A lane starts `WARM_UP` words before its segment, at a word where perhaps no attempt
begins. That does not matter: 98.5% of attempts take one word, so any two walks soon meet and then stay together. That
they have not met after 64 words has a chance below 1e-30.

Plain twin, switch, test and what it buys: see `noise.py`, which launches these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors

# No number is specialised (`do_not_specialize`): Triton would compile again for a key, or a count, of another kind.

SEGMENT = 128  # words through which one lane walks
WARM_UP = tl.constexpr(64)
_LONGEST = tl.constexpr(101)  # words of an attempt: fifty tries in the tail, of which one in 14 fails
_LANES = 32  # of one warp, which need not wait for others
_WIDE = 1 << 40  # added to the halves of a key, so that Triton sees one type for all keys and compiles once


def philox_words(words: Tensor, key: tuple[int, int], first_part: int) -> None:
    """Fill words (parts, width) int64, width a multiple of 4, as NumPy's Philox of this key, jumped by each part."""
    parts, width = words.shape
    halves = [(number >> shift & 0xFFFFFFFF) + _WIDE for number in key for shift in (0, 32)]
    grid = (triton.cdiv(width // 4, 256), parts)
    _philox_words[grid](words, *halves, first_part + _WIDE, width // 4, 256, num_warps=4)


@triton.jit(do_not_specialize=["low0", "high0", "low1", "high1", "first_part", "blocks"])
def _philox_words(words, low0, high0, low1, high1, first_part, blocks, BLOCK: tl.constexpr):
    """Philox-4x64-10 (Salmon et al., 2011). The counter of block b of part p is (b + 1, 0, p, 0)."""
    part = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low0, high0, low1, high1 = (low0 & 0xFFFFFFFF, high0 & 0xFFFFFFFF, low1 & 0xFFFFFFFF, high1 & 0xFFFFFFFF)
    key0 = (low0 | (high0 << 32)).to(tl.uint64, bitcast=True)
    key1 = (low1 | (high1 << 32)).to(tl.uint64, bitcast=True)
    zero = tl.zeros((BLOCK,), tl.uint64)
    a, b, d = (block + 1).to(tl.uint64), zero, zero
    c = zero + (part + (first_part & 0xFFFFFFFF)).to(tl.uint64)
    first = tl.full((BLOCK,), 0xD2E7470EE14C6C93, tl.uint64)
    second = tl.full((BLOCK,), 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        above, below = tl.umulhi(a, first), a * first
        a, b, c, d = tl.umulhi(c, second) ^ b ^ key0, c * second, above ^ d ^ key1, below
        key0 += 0x9E3779B97F4A7C15
        key1 += 0xBB67AE8584CAA73B
    place = words + (part * blocks + block) * 4
    inside = block < blocks
    tl.store(place, a.to(tl.int64, bitcast=True), mask=inside)
    tl.store(place + 1, b.to(tl.int64, bitcast=True), mask=inside)
    tl.store(place + 2, c.to(tl.int64, bitcast=True), mask=inside)
    tl.store(place + 3, d.to(tl.int64, bitcast=True), mask=inside)


def chacha20_words(words: Tensor, key: tuple[int, ...], first_part: int) -> None:
    """Fill words (parts, width) int64, width a multiple of 8, with the key stream of ChaCha20; key: 8 of 32 bits."""
    parts, width = words.shape
    grid = (triton.cdiv(width // 8, 128), parts)
    _chacha20_words[grid](words, *[number + _WIDE for number in key], first_part + _WIDE, width // 8, 128, num_warps=4)


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _pair(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "first_part", "blocks"])
def _chacha20_words(words, k0, k1, k2, k3, k4, k5, k6, k7, first_part, blocks, BLOCK: tl.constexpr):
    """RFC 8439, section 2.3. The block counter is the block's number in its part, the nonce is (part, 0, 0)."""
    part = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.uint32)
    a0, a1, a2, a3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    b0, b1 = zero + (k0 & 0xFFFFFFFF).to(tl.uint32), zero + (k1 & 0xFFFFFFFF).to(tl.uint32)
    b2, b3 = zero + (k2 & 0xFFFFFFFF).to(tl.uint32), zero + (k3 & 0xFFFFFFFF).to(tl.uint32)
    c0, c1 = zero + (k4 & 0xFFFFFFFF).to(tl.uint32), zero + (k5 & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = zero + (k6 & 0xFFFFFFFF).to(tl.uint32), zero + (k7 & 0xFFFFFFFF).to(tl.uint32)
    d0, d1 = block.to(tl.uint32), zero + ((part + first_part) & 0xFFFFFFFF).to(tl.uint32)
    d2, d3 = zero, zero
    s0, s1, s2, s3, s4, s5, s6, s7 = a0, a1, a2, a3, b0, b1, b2, b3
    s8, s9, s10, s11, s12, s13, s14, s15 = c0, c1, c2, c3, d0, d1, d2, d3
    for _ in range(10):
        a0, b0, c0, d0 = _quarter_round(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter_round(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter_round(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter_round(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter_round(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter_round(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter_round(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter_round(a3, b0, c1, d2)
    place = words + (part * blocks + block) * 8
    inside = block < blocks
    tl.store(place, _pair(a0 + s0, a1 + s1), mask=inside)
    tl.store(place + 1, _pair(a2 + s2, a3 + s3), mask=inside)
    tl.store(place + 2, _pair(b0 + s4, b1 + s5), mask=inside)
    tl.store(place + 3, _pair(b2 + s6, b3 + s7), mask=inside)
    tl.store(place + 4, _pair(c0 + s8, c1 + s9), mask=inside)
    tl.store(place + 5, _pair(c2 + s10, c3 + s11), mask=inside)
    tl.store(place + 6, _pair(d0 + s12, d1 + s13), mask=inside)
    tl.store(place + 7, _pair(d2 + s14, d3 + s15), mask=inside)


def numbers_from(
    words: Tensor, units: Tensor, limits: Tensor, heights: Tensor, numbers: Tensor, part_size: int
) -> None:
    """Fill numbers (count,) float64: part p of `part_size` numbers from row p of words (parts, width) int64.

    `width` is a multiple of `SEGMENT`. For units, limits and heights see `clipline.random.normal_numbers.Layers`.
    """
    parts, width = words.shape
    spans = torch.empty(parts, width, dtype=torch.int8, device=words.device)
    # Without fused multiplications and additions, which NumPy's numbers do not have.
    exact = {"enable_fp_fusion": False}
    _spans[triton.cdiv(width, 512), parts](words, units, limits, heights, spans, width, 512, num_warps=4, **exact)
    segments = width // SEGMENT
    counts = torch.empty(parts, segments, dtype=torch.int32, device=words.device)
    grid = (triton.cdiv(segments, _LANES), parts)
    _counts[grid](spans, counts, segments, SEGMENT, _LANES, num_warps=1)
    before = counts.cumsum(1, dtype=torch.int32) - counts
    _place[grid](
        words, spans, before, units, numbers, len(numbers), part_size, segments, SEGMENT, _LANES, num_warps=1, **exact
    )


@triton.jit
def _uniform(words, mask):
    """Multiples of 2^-53 in [0, 1)."""
    word = tl.load(words, mask=mask, other=0).to(tl.uint64, bitcast=True)
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _tail(units):
    """Where the tail begins: at the end of the last layer."""
    return tl.load(units + 255) * 4503599627370496.0


@triton.jit(do_not_specialize=["width"])
def _spans(words, units, limits, heights, spans, width, BLOCK: tl.constexpr):
    """How many words an attempt takes that begins here, negative if it gives no number."""
    row = tl.program_id(1).to(tl.int64) * width
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    words += row + place
    word = tl.load(words, mask=inside, other=0)
    layer, whole = word & 255, (word >> 9) & 0xFFFFFFFFFFFFF
    slow = inside & (whole >= tl.load(limits + layer))
    beside = slow & (layer > 0) & (place + 1 < width)
    low = tl.load(heights + layer, mask=beside, other=0.0)
    high = tl.load(heights + layer - 1, mask=beside, other=0.0)
    value = whole.to(tl.float64) * tl.load(units + layer, mask=beside, other=0.0)
    under = (high - low) * _uniform(words + 1, beside) + low < tl.exp(-0.5 * value * value)
    span = tl.where(slow, tl.where(under, 2, -2), 1)
    in_tail = slow & (layer == 0)
    span = tl.where(in_tail, 1, span)
    scale = -1.0 / _tail(units)
    while tl.max(in_tail.to(tl.int32), axis=0) > 0:
        # 1 - u is exact, so that this is log1p(-u), which Triton does not have.
        beyond = scale * tl.log(1.0 - _uniform(words + span, in_tail & (place + span < width)))
        height = -tl.log(1.0 - _uniform(words + span + 1, in_tail & (place + span + 1 < width)))
        span = tl.where(in_tail, span + 2, span)
        again = (height + height <= beyond * beyond) & (span < _LONGEST) & (place + span < width)
        in_tail = in_tail & again
    tl.store(spans + row + place, span.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["segments"])
def _counts(spans, counts, segments, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """How many numbers begin in each segment."""
    row = tl.program_id(1).to(tl.int64) * segments
    segment = tl.program_id(0) * LANES + tl.arange(0, LANES)
    begin = segment * SEGMENT
    end = tl.where(segment < segments, begin + SEGMENT, 0)
    place = tl.maximum(begin - WARM_UP, 0)
    count = tl.zeros((LANES,), tl.int32)
    for _ in range(SEGMENT + WARM_UP):
        span = tl.load(spans + row * SEGMENT + place, mask=place < end, other=0).to(tl.int32)
        count += ((place >= begin) & (span > 0)).to(tl.int32)
        place += tl.abs(span)
    tl.store(counts + row + segment, count, mask=segment < segments)


@triton.jit(do_not_specialize=["total", "part_size", "segments"])
def _place(
    words, spans, before, units, numbers, total, part_size, segments, SEGMENT: tl.constexpr, LANES: tl.constexpr
):
    """Write the numbers of each segment behind those of the segments `before` it."""
    part = tl.program_id(1).to(tl.int64)
    row = part * segments
    segment = tl.program_id(0) * LANES + tl.arange(0, LANES)
    begin = segment * SEGMENT
    end = tl.where(segment < segments, begin + SEGMENT, 0)
    place = tl.maximum(begin - WARM_UP, 0)
    target = tl.load(before + row + segment, mask=segment < segments, other=0)
    tail = _tail(units)
    for _ in range(SEGMENT + WARM_UP):
        span = tl.load(spans + row * SEGMENT + place, mask=place < end, other=0).to(tl.int32)
        wanted = (place >= begin) & (span > 0) & (target < part_size)
        word = tl.load(words + row * SEGMENT + place, mask=wanted, other=0)
        whole = (word >> 9) & 0xFFFFFFFFFFFFF
        value = whole.to(tl.float64) * tl.load(units + (word & 511), mask=wanted, other=0.0)
        in_tail = wanted & (span > 1) & ((word & 255) == 0)
        if tl.max(in_tail.to(tl.int32), axis=0) > 0:
            last = words + row * SEGMENT + place + span - 2  # the pair of words that was accepted
            ended = place + span - 2 >= segments * SEGMENT  # with the words of the row; no such number is wanted
            beyond = tail + -1.0 / tail * tl.log(1.0 - _uniform(last, in_tail & ~ended))
            value = tl.where(in_tail, tl.where(((word >> 17) & 1) == 1, -beyond, beyond), value)
        where = part * part_size + target
        tl.store(numbers + where, value, mask=wanted & (where < total))
        target += wanted.to(tl.int32)
        place += tl.abs(span)
