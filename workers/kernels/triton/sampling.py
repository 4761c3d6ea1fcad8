"""Sampling of tokens in one kernel, without a sort: thresholds are found by narrowing an interval.

Top_k and top_p keep the tokens from some logit on: the largest logit at which a sum over the tokens below is small
enough. Floats are ordered as the integers that their bits make. Each pass over a row cuts an interval of integers to a
quarter. The search ends early when a single token is left in the interval.

The passes are short where few tokens matter, because these are gathered first:
- top_k: the first pass finds each lane's best token. The k-th best of these is at most the k-th best of all. The tokens
  from there on are gathered, a few hundred, and the rest is ignored.
- top_p: tokens less likely than the dropped mass, divided by the vocabulary, are dropped. A few passes then quarter the
  interval of logits from there to the best, by sums in float32 that leave room for their rounding. The tokens in the
  interval that is left are gathered, and searched with the exact sum of what lies below.
"""

import triton
import triton.language as tl

BLOCK, WARPS = 4096, 16
BLOCKS = tl.constexpr(2)
ROUNDS = tl.constexpr(8)
ROUNDING = tl.constexpr(1e-4)  # of a sum of a vocabulary's weights, far more than it can be


@triton.jit
def sample_tokens(
    logits, uniforms, temperature, top_p, min_p, top_k, gathered, indices, last, tickets, words, keys, done,
    pitch, half_size, vocab, greedy_below, parts, MIN_KEY: tl.constexpr, TOKEN_BITS: tl.constexpr,
    NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr, SAMPLE_BLOCK: tl.constexpr
):  # fmt: skip
    """`parts` programs a row: each finds its best token, and the last program posts the best of all."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * pitch
    ticket = tl.load(tickets + row)
    word = words + ((ticket >> TOKEN_BITS) & 1) * half_size + row
    if tl.load(temperature + row).to(tl.float32) >= greedy_below:
        if part == 0:
            token = _sample_token(
                logits, row, uniforms, temperature, top_p, min_p, top_k, gathered, indices, vocab, NOT_FINITE,
                SAMPLE_BLOCK
            )  # fmt: skip
            _post(token, last + row, word, ticket)
    else:
        best, token = _first_best(logits, part, vocab, parts, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
        token = tl.where(tl.abs(best) == float("inf"), NOT_FINITE, token)
        if parts == 1:
            _post(token, last + row, word, ticket)
        else:
            # Of equals the first is the largest: zeros of either sign are equal.
            key = (_order_of(tl.where(best == 0, 0.0, best)).to(tl.int64) << 32) + (NOT_FINITE - token)
            tl.atomic_max(keys + row, key)
            if tl.atomic_add(done + row, 1) == parts - 1:
                key = tl.atomic_xchg(keys + row, MIN_KEY)
                tl.store(done + row, 0)
                _post(NOT_FINITE - (key & 0x7FFFFFFF), last + row, word, ticket)


@triton.jit
def _post(token, last, word, ticket):
    tl.store(last, token)
    # One store of eight bytes: a reader that finds the ticket has the token, too.
    tl.store(word, ticket | token, mask=ticket > 0, cache_modifier=".wt")


@triton.jit
def _first_best(row, part, vocab, parts, BLOCK: tl.constexpr):
    """The best logit of every `parts`-th block, and the first token, int64, that has it. NaN counts as infinity.
    Each lane keeps the best of what it has seen."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for begin in range(part * BLOCK, vocab, parts * BLOCK):
        token = begin + lane
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit)
        better = logit > best
        best, where = tl.where(better, logit, best), tl.where(better, token, where)
    row_max = tl.max(best, 0)
    return row_max, tl.cast(tl.min(tl.where(best == row_max, where, vocab - 1), 0), tl.int64)


@triton.jit
def _sample_token(
    row, one, uniforms, temperature, top_p, min_p, top_k, gathered, indices, vocab, NOT_FINITE: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Samples a token, int64, from the logits at `row`, with entry `one` of the others. A token's weight is its
    probability ÷ that of the best. cold: 1 ÷ temperature. NOT_FINITE of logits that have NaN or infinity."""
    cold, least, mass, k = (
        1 / tl.load(temperature + one).to(tl.float32), tl.load(min_p + one).to(tl.float32),
        tl.load(top_p + one).to(tl.float32), tl.load(top_k + one)
    )  # fmt: skip
    row_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCKS * BLOCK):
        logits = _load_blocks(row, begin, vocab, 1.0, BLOCK)
        row_max = tl.maximum(row_max, tl.max(tl.where(logits != logits, float("inf"), logits), 0))
    row_max *= cold
    best = tl.max(row_max, 0)
    above = _order_of(best).to(tl.int64) + 1  # nothing has an order this high
    low = tl.full((), -(1 << 31), tl.int64)
    gathered += one * BLOCK
    indices += one * BLOCK
    few = False
    if k > 0 and k < tl.minimum(vocab, BLOCK):
        last = tl.full((), 0x7FFFFFFF, tl.int32)  # NaN is gathered
        few = _gather(row, vocab, cold, _best(_order_of(row_max), k), last, gathered, indices, BLOCK)
    # Not by an `if`: the compiler is to know that both are multiples of 16, or it loads number by number.
    row, vocab = tl.where(few, gathered, row), tl.where(few, BLOCK, vocab)
    if k > 0 and k < vocab:
        low = _search(row, vocab, cold, best, 0.0, low, above, (vocab - k).to(tl.float64), tl.constexpr(False), BLOCK)
    if mass < 1:
        low = _nucleus(row, vocab, cold, best, least, low, above, 1 - mass.to(tl.float64), gathered, indices, BLOCK)
    row_sum = _row_sum(row, vocab, cold, best, least, low, BLOCK)
    token = _invert(row, vocab, cold, best, least, low, tl.load(uniforms + one) * row_sum, BLOCK)
    if few:
        token = tl.load(indices + token).to(tl.int64)
    return tl.where(tl.abs(best) == float("inf"), NOT_FINITE, token)


@triton.jit
def _best(orders, k):
    """Returns the k-th largest of orders [BLOCK], which has at least k."""
    low, above = tl.full((), -(1 << 31), tl.int64), tl.full((), 1 << 31, tl.int64)
    while above - low > 1:
        middle = (low + above) // 2
        enough = tl.sum((orders >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low, above = tl.where(enough, middle, low), tl.where(enough, above, middle)
    return low.to(tl.int32)


@triton.jit
def _gather(row, vocab, cold, first, last, gathered, indices, BLOCK: tl.constexpr):
    """Whether at most BLOCK tokens have an order from `first` to `last`, int32. If so, `indices` has them in ascending
    order, and `gathered` their logits and -inf after them."""
    count = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        order = _order_of(_load(row, begin, vocab, cold, BLOCK))
        here = (order >= first) & (order <= last) & (token < vocab)
        number = tl.sum(here.to(tl.int32), 0)
        if number != 0:
            index = count + tl.cumsum(here.to(tl.int32), 0) - 1
            fits = here & (index < BLOCK)
            tl.store(gathered + index, tl.load(row + token, mask=fits), mask=fits)
            tl.store(indices + index, token, mask=fits)
        count += number
    lane = tl.arange(0, BLOCK)
    tl.store(gathered + lane, float("-inf"), mask=lane >= count)
    tl.debug_barrier()  # all threads have stored before any reads
    return count <= BLOCK


@triton.jit
def _load(row, begin, vocab, cold, BLOCK: tl.constexpr):
    """Loads scaled logits, -inf outside."""
    token = begin + tl.arange(0, BLOCK)
    logits = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return logits * cold


@triton.jit
def _load_blocks(row, begin, vocab, cold, BLOCK: tl.constexpr):
    """Loads [BLOCKS, BLOCK] logits: a program waits for several loads at once."""
    token = begin + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return logits * cold


@triton.jit
def _order_of(values):
    """Returns int32 that are ordered as the floats are."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(scaled, best, least, low):
    """0 for what is filtered out: weights below `least`, orders below `low`."""
    weights = tl.exp(scaled - best)
    return tl.where((weights >= least) & (_order_of(scaled) >= low.to(tl.int32)), weights, 0.0)


@triton.jit
def _row_sum(row, vocab, cold, best, least, low, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, vocab, BLOCKS * BLOCK):
        sums += tl.sum(_weights(_load_blocks(row, begin, vocab, cold, BLOCK), best, least, low), 0).to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _sums(row, vocab, cold, best, least, low, middle, BLOCK: tl.constexpr):
    """Returns the sum of weights from the order `low` on, and the part below `middle`."""
    sums, below = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, vocab, BLOCKS * BLOCK):
        scaled = _load_blocks(row, begin, vocab, cold, BLOCK)
        weights = _weights(scaled, best, least, low)
        sums += tl.sum(weights, 0).to(tl.float64)
        below += tl.sum(tl.where(_order_of(scaled) < middle.to(tl.int32), weights, 0.0), 0).to(tl.float64)
    return tl.sum(sums, 0), tl.sum(below, 0)


@triton.jit
def _nucleus(row, vocab, cold, best, least, low, above, dropped, gathered, indices, BLOCK: tl.constexpr):
    """The largest order, from `low` to below `above`, below which tokens from `low` on have at most the fraction
    `dropped` of their weights. Where vocab is more than BLOCK, `gathered` and `indices` are written."""
    left, right, few = low, above, False
    if vocab > BLOCK:
        left, right, few = _narrow(row, vocab, cold, best, least, low, above, dropped.to(tl.float32), BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    total, below = _sums(row, vocab, cold, best, least, low, left, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    limit = dropped * total - below
    if few:
        _gather(row, vocab, cold, left.to(tl.int32), (right - 1).to(tl.int32), gathered, indices, BLOCK)
    row, vocab = tl.where(few, gathered, row), tl.where(few, BLOCK, vocab)
    return _search(row, vocab, cold, best, least, left, right, limit, tl.constexpr(True), BLOCK)


@triton.jit
def _narrow(row, vocab, cold, best, least, low, above, dropped, BLOCK: tl.constexpr):
    """Orders between which surely is what _nucleus looks for, and whether at upper BLOCK tokens are."""
    lower, upper = best - tl.log(vocab.to(tl.float32) / dropped) - 0.01, best
    left, right = tl.maximum(low, _order_of(lower).to(tl.int64)), above
    under_left = tl.full((), 0, tl.int32)
    under_right = tl.cdiv(vocab, BLOCKS * BLOCK) * (BLOCKS * BLOCK)  # what stands after the vocabulary, too
    rounds = tl.full((), 0, tl.int32)
    while (under_right - under_left > BLOCK) & (rounds < ROUNDS):
        step = (upper - lower) / 4
        a, b, c = lower + step, lower + 2 * step, lower + 3 * step
        total, sum_a, sum_b, sum_c, count_a, count_b, count_c = _under(
            row, vocab, cold, best, least, low, a, b, c, BLOCK
        )
        limit = dropped * total
        less, more = limit * (1 - ROUNDING), limit * (1 + ROUNDING)
        under_left = tl.where(
            sum_c < less, count_c, tl.where(sum_b < less, count_b, tl.where(sum_a < less, count_a, under_left))
        )
        under_right = tl.where(
            sum_a > more, count_a, tl.where(sum_b > more, count_b, tl.where(sum_c > more, count_c, under_right))
        )
        lower = tl.where(sum_c < less, c, tl.where(sum_b < less, b, tl.where(sum_a < less, a, lower)))
        upper = tl.where(sum_a > more, a, tl.where(sum_b > more, b, tl.where(sum_c > more, c, upper)))
        right = tl.where(sum_c > more, _order_of(upper).to(tl.int64), right)
        rounds += 1
    left = tl.maximum(left, _order_of(lower).to(tl.int64))
    return left, right, under_right - under_left <= BLOCK


@triton.jit
def _under(row, vocab, cold, best, least, low, a, b, c, BLOCK: tl.constexpr):
    """Returns in float32 the sum of weights from the order `low` on, and the sums below each of three logits. Then the
    number of all tokens below each."""
    counts_a, counts_b, counts_c = (
        tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    )  # fmt: skip
    sums, sums_a, sums_b, sums_c = (
        tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32)
    )  # fmt: skip
    for begin in range(0, vocab, BLOCKS * BLOCK):
        scaled = _load_blocks(row, begin, vocab, cold, BLOCK)
        order, weights = _order_of(scaled), _weights(scaled, best, least, low)
        under_a, under_b, under_c = order < _order_of(a), order < _order_of(b), order < _order_of(c)
        counts_a += tl.sum(under_a.to(tl.int32), 0)
        counts_b += tl.sum(under_b.to(tl.int32), 0)
        counts_c += tl.sum(under_c.to(tl.int32), 0)
        sums += tl.sum(weights, 0)
        sums_a += tl.sum(tl.where(under_a, weights, 0.0), 0)
        sums_b += tl.sum(tl.where(under_b, weights, 0.0), 0)
        sums_c += tl.sum(tl.where(under_c, weights, 0.0), 0)
    return (
        tl.sum(sums, 0), tl.sum(sums_a, 0), tl.sum(sums_b, 0), tl.sum(sums_c, 0),
        tl.sum(counts_a, 0), tl.sum(counts_b, 0), tl.sum(counts_c, 0)
    )  # fmt: skip


@triton.jit
def _search(row, vocab, cold, best, least, low, above, limit, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order, from `low` to below `above`, below which tokens from `low` on come to at most `limit`: their
    weights, or (WEIGH False) their number."""
    filtered = low
    below_low, below_above = tl.full((), 0, tl.int32), tl.full((), 0x7FFFFFFF, tl.int32)
    while (above - low > 1) & (below_above - below_low > 1):
        step = (above - low) // 4
        a, b, c = low + step, low + (above - low) // 2, above - tl.maximum(step, 1)
        counts_a, counts_b, counts_c = (
            tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        )  # fmt: skip
        sums_a, sums_b, sums_c = (
            tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        )  # fmt: skip
        for begin in range(0, vocab, BLOCK):
            scaled = _load(row, begin, vocab, cold, BLOCK)
            order = _order_of(scaled)
            there = (begin + tl.arange(0, BLOCK) < vocab) & (order >= filtered.to(tl.int32))
            under_a, under_b = there & (order < a.to(tl.int32)), there & (order < b.to(tl.int32))
            under_c = there & (order < c.to(tl.int32))
            counts_a += under_a.to(tl.int32)
            counts_b += under_b.to(tl.int32)
            counts_c += under_c.to(tl.int32)
            if WEIGH:
                weights = _weights(scaled, best, least, filtered).to(tl.float64)
                sums_a += tl.where(under_a, weights, 0.0)
                sums_b += tl.where(under_b, weights, 0.0)
                sums_c += tl.where(under_c, weights, 0.0)
        count_a, count_b, count_c = tl.sum(counts_a, 0), tl.sum(counts_b, 0), tl.sum(counts_c, 0)
        if WEIGH:
            fit_a, fit_b, fit_c = tl.sum(sums_a, 0) <= limit, tl.sum(sums_b, 0) <= limit, tl.sum(sums_c, 0) <= limit
        else:
            fit_a, fit_b, fit_c = count_a <= limit, count_b <= limit, count_c <= limit
        # What is below grows with the order, so fits hold up to some point.
        above = tl.where(fit_c, above, tl.where(fit_b, c, tl.where(fit_a, b, a)))
        below_above = tl.where(fit_c, below_above, tl.where(fit_b, count_c, tl.where(fit_a, count_b, count_a)))
        low = tl.where(fit_c, c, tl.where(fit_b, b, tl.where(fit_a, a, low)))
        below_low = tl.where(fit_c, count_c, tl.where(fit_b, count_b, tl.where(fit_a, count_a, below_low)))
    return low


@triton.jit
def _invert(row, vocab, cold, best, least, low, target, BLOCK: tl.constexpr):
    """The first token at which the running sum of weights exceeds target; the last that has weight where none does."""
    begin, before = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)  # the sum up to the block
    if vocab > BLOCK:
        begin, before = _skip(row, vocab, cold, best, least, low, target, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    found, last = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    while (found < 0) & (begin < vocab):
        weights = _weights(_load(row, begin, vocab, cold, BLOCK), best, least, low).to(tl.float64)
        token = begin + tl.arange(0, BLOCK)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, token, 0), 0))
        of_block = tl.sum(weights, 0)
        if before + of_block > target:
            sums = before + tl.cumsum(weights, 0)
            first = tl.min(tl.where((sums > target) & (weights > 0), token, vocab), 0)
            # Rounded otherwise, the sum of the whole block may exceed what its running sum does not.
            found = tl.where(first < vocab, first, last)
        before += of_block
        begin += BLOCK
    return tl.where(found < 0, last, found).to(tl.int64)


@triton.jit
def _skip(row, vocab, cold, best, least, low, target, BLOCK: tl.constexpr):
    """Returns the first of the blocks in which the sum of weights exceeds target, and the sum before them; (0, 0)
    without."""
    begin, before = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    here = _blocks(row, begin, vocab, cold, best, least, low, BLOCK)
    while (before + here <= target) & (begin < vocab):
        before += here
        begin += BLOCKS * BLOCK
        here = _blocks(row, begin, vocab, cold, best, least, low, BLOCK)
    return tl.where(begin < vocab, begin, 0), tl.where(begin < vocab, before, 0.0)


@triton.jit
def _blocks(row, begin, vocab, cold, best, least, low, BLOCK: tl.constexpr):
    """Returns the sum of weights of BLOCKS blocks."""
    weights = _weights(_load_blocks(row, begin, vocab, cold, BLOCK), best, least, low)
    return tl.sum(tl.sum(weights, 0).to(tl.float64), 0)
