// Sums of large tensors. Half of each packet is its epoch. Here ranks send plain data, and one flag after many bytes.
//
// Block b of each rank talks to block b of the other ranks only. A GPU starts blocks in order. So the first block that is
// not done on all ranks has started on each of them, or can start, whatever else runs on these GPUs.
//
// A tensor is cut into pieces, and block b has pieces b, b + gridDim.x, …. With two ranks a piece is one chunk: each rank
// sends its own to the other, and both add up. With more ranks a piece has a chunk for each rank, which adds up that chunk
// and sends the sum to all. A block works in rounds. In round r, its k-th of this launch, it does this:
//
//   send     the chunks of piece k to the ranks that add them up (phase 0)
//   wait     until the others have signaled round r - AHEAD
//   add up   the own chunk of piece k - AHEAD; with more than two ranks, send the sum (phase 1)
//   copy     the other chunks of piece k - 2 AHEAD from the sums that arrived in round r - AHEAD
//   signal   round r to the others
//
// Rounds are counted from launch to launch. Data of round r goes into buffer r % BUFFERS of its phase. That buffer held
// data of round r - 2 AHEAD - 1, and its reader no longer needs them:
//
//   - Before round r this block has waited for the reader's round r - AHEAD - 1: one round ago, or in an earlier launch.
//   - Before the reader signaled that round, it had used all data of round r - 2 AHEAD - 1 and of earlier ones. The first
//     rounds of a launch wait for nobody, but each launch uses all data of its own rounds before it ends.
//
// So nothing is ever cleared, and no launch begins or ends with a handshake.
#include "ranks.cuh"

constexpr int BUFFERS = 2 * AHEAD + 1;

struct Tensors {
    const Vector* x;
    Vector* out;
    long long count;  // vectors of x
    int length;       // of a chunk

    // Vectors of the chunk that begins at `first`. The last chunks may have fewer than others, or none.
    __device__ inline int count_at(long long first) const {
        if (count - first < length) return count < first ? 0 : count - first;
        return length;
    }
};

// The buffer of rank `of` for data that block blockIdx.x of rank `from` sends in a round. Each rank has
// buffers [blocks][phases][size - 1 senders][BUFFERS] of buffer_vectors, behind its slots.
__device__ inline Vector* buffer(const Ranks& ranks, int of, int phase, int from, Data round) {
    long long slot_bytes = ranks.slot_packets * (long long)sizeof(Packet), phases = ranks.size > 2 ? 2 : 1;
    long long number = (blockIdx.x * phases + phase) * (ranks.size - 1) + (from < of ? from : from - 1);
    auto* first = reinterpret_cast<Vector*>(ranks.areas[of] + HEADER + 2 * 2 * ranks.size * slot_bytes);
    return first + (number * BUFFERS + (int)(round % BUFFERS)) * ranks.buffer_vectors;
}

// This thread's share of vectors 0 … count - 1, in batches: `index` of `each` of a batch.
#define EACH_BATCH(at, count) for (int at = threadIdx.x; at < (count); at += BATCH * blockDim.x)
#define EACH_OF_BATCH(at, each, index, count)                  \
    _Pragma("unroll") for (int each = 0; each < BATCH; each++) \
        if (int index = (at) + each * blockDim.x; index < (count))

struct Copy {
    const Vector* source;
    Vector* target;
    int count;
};

// Makes copy_of(peer), of at most `length` vectors, for each other rank. The loads of a batch are in flight together.
template <int MOST, class CopyOf>
__device__ inline void copy_for_peers(const Ranks& ranks, int length, CopyOf copy_of) {
    constexpr int BATCH = MAX_GPU_RANKS / MOST;
    Copy copies[MOST];
#pragma unroll
    for (int step = 1; step < MOST; step++) {
        int peer = ranks.rank + step < ranks.size ? ranks.rank + step : ranks.rank + step - ranks.size;
        if (step < ranks.size) copies[step] = copy_of(peer);
        else copies[step].count = 0;
    }
    EACH_BATCH(at, length) {
        Vector found[MOST][BATCH];
#pragma unroll
        for (int step = 1; step < MOST; step++)
            EACH_OF_BATCH(at, each, index, copies[step].count)
                found[step][each] = load_vector(copies[step].source + index);
#pragma unroll
        for (int step = 1; step < MOST; step++)
            EACH_OF_BATCH(at, each, index, copies[step].count)
                copies[step].target[index] = found[step][each];
    }
}

// Adds up the chunk that begins at `first`, whose parts came in round `ready`. With more than two ranks the sum goes to
// all of them in this round.
template <class T, int MOST>
__device__ inline void add_chunk(const Ranks& ranks, const Tensors& tensors, long long first, Data ready, Data round) {
    constexpr int BATCH = MAX_GPU_RANKS / MOST;
    int rank = ranks.rank, size = ranks.size;
    int count = tensors.count_at(first);
    EACH_BATCH(at, count) {
        Vector found[BATCH][MOST];
#pragma unroll
        for (int from = 0; from < MOST; from++) {
            if (from >= size) break;
            const Vector* source = from == rank ? tensors.x + first : buffer(ranks, rank, 0, from, ready);
            EACH_OF_BATCH(at, each, index, count) found[each][from] = load_vector(source + index);
        }
        EACH_OF_BATCH(at, each, index, count) {
            Vector sum = add_in_order<T>(found[each], size);
            tensors.out[first + index] = sum;
            if (MOST > 2)
                for (int to = 0; to < size; to++)
                    if (to != rank) buffer(ranks, to, 1, rank, round)[index] = sum;
        }
    }
}

// All threads of the block go on once the others have signaled so many rounds. The last threads look at the flags, since
// the first ones may still be held by the fence of their own signal.
__device__ inline void await_peers(const Ranks& ranks, Data rounds, Patience& patience) {
    const Data* flags = header(ranks, ranks.rank)->flags[blockIdx.x];
    for (unsigned from = blockDim.x - 1 - threadIdx.x; from < ranks.size; from += blockDim.x)
        while (from != ranks.rank && acquire_flag(flags + from) < rounds) patience.look(ranks);
    __syncthreads();
}

// The barrier and the release order what all threads of the block have done before the flag: what they stored for the
// others, and what they loaded from buffers that the others fill again.
__device__ inline void signal_peers(const Ranks& ranks, Data rounds) {
    __syncthreads();
    for (unsigned to = threadIdx.x; to < ranks.size; to += blockDim.x)
        if (to != ranks.rank) release_flag(&header(ranks, to)->flags[blockIdx.x][ranks.rank], rounds);
}

// out becomes the sum of all ranks' x. MOST: 2 for two ranks, else at least their number. Each block has a piece.
template <class T, int MOST>
__device__ inline void sum_streamed(const Ranks& ranks, const Tensors& tensors) {
    await_earlier_kernels();
    Data* counted = &header(ranks, ranks.rank)->rounds[blockIdx.x];
    Data begin = *static_cast<volatile Data*>(counted);
    Patience patience;
    int rank = ranks.rank, length = tensors.length;
    long long piece = (MOST > 2 ? ranks.size : 1LL) * length;                             // vectors
    int pieces = ((tensors.count + piece - 1) / piece - 1 - blockIdx.x) / gridDim.x + 1;  // of this block
    int rounds = MOST > 2 ? pieces + AHEAD : pieces;                                      // in which it sends
    auto first = [&](int k, int of) {
        return (blockIdx.x + (long long)k * gridDim.x) * piece + (MOST > 2 ? of * length : 0);
    };
    for (int k = 0; k < rounds + AHEAD; k++) {
        Data round = begin + k, ready = round - AHEAD;
        if (k < pieces)
            copy_for_peers<MOST>(ranks, length, [&](int to) -> Copy {
                return {tensors.x + first(k, to), buffer(ranks, to, 0, rank, round), tensors.count_at(first(k, to))};
            });
        if (k >= AHEAD) await_peers(ranks, ready + 1, patience);
        if (k >= AHEAD && k - AHEAD < pieces)
            add_chunk<T, MOST>(ranks, tensors, first(k - AHEAD, rank), ready, round);
        if (MOST > 2 && k >= 2 * AHEAD)
            copy_for_peers<MOST>(ranks, length, [&](int from) -> Copy {
                long long at = first(k - 2 * AHEAD, from);
                return {buffer(ranks, rank, 1, from, ready), tensors.out + at, tensors.count_at(at)};
            });
        if (k < rounds) signal_peers(ranks, round + 1);
    }
    if (threadIdx.x == 0) *counted = begin + rounds;
}
