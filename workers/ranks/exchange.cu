// Sums and gatherings of what the ranks of a worker have, each on a GPU of its own, in memory that all of them map.
// device_ranks.py launches them and is the home of the constants.
//
// An exchange stores packets into the other ranks' slots, and waits for theirs. A packet is 16 bytes that are stored and
// loaded as one: 8 bytes of data, then the epoch, which counts exchanges. So a reader that finds its epoch has the data,
// and nothing is ever cleared. A slot is filled again two epochs later. By then its reader has sent a packet of the epoch
// between, and so has ended this one. Large tensors are summed by streams.cuh.
#include "streams.cuh"

template <class T>
constexpr int EACH = sizeof(Data) / sizeof(T);  // numbers of a packet

__device__ inline Packet* slot(const Ranks& ranks, int of, int phase, int from, Data epoch) {
    long long number = ((long long)(epoch & 1) * 2 + phase) * ranks.size + from;
    return reinterpret_cast<Packet*>(ranks.areas[of] + HEADER) + number * ranks.slot_packets;
}

__device__ inline Data receive(const Ranks& ranks, const Packet* source, Data epoch, Patience& patience) {
    for (;;) {
        Packet packet = load_packet(source);
        if (packet.epoch == epoch) return packet.data;
        patience.look(ranks);
    }
}

// The sum of all ranks' numbers, in the order of ranks, of which this rank has `own`. All loads are under way at once.
template <class T>
__device__ inline Data add_up(const Ranks& ranks, long long index, Data own, Data epoch, Patience& patience) {
    Packet packets[MAX_GPU_RANKS];
    unsigned missing = ((1u << ranks.size) - 1) & ~(1u << ranks.rank);
    while (missing) {
#pragma unroll
        for (int from = 0; from < MAX_GPU_RANKS; from++)
            if (missing >> from & 1) packets[from] = load_packet(slot(ranks, ranks.rank, 0, from, epoch) + index);
#pragma unroll
        for (int from = 0; from < MAX_GPU_RANKS; from++)
            if ((missing >> from & 1) && packets[from].epoch == epoch) missing &= ~(1u << from);
        if (missing) patience.look(ranks);
    }
    Data found[MAX_GPU_RANKS];
#pragma unroll
    for (int from = 0; from < MAX_GPU_RANKS; from++) found[from] = from == ranks.rank ? own : packets[from].data;
    return add_in_order<T>(found, ranks.size);
}

// The numbers of a packet of x [count]; the last packet may have fewer.
template <class T>
__device__ inline Data numbers_of(const T* x, long long packet, long long count) {
    long long first = packet * EACH<T>;
    if (first + EACH<T> <= count) return *reinterpret_cast<const Data*>(x + first);
    Data data = 0;
    T numbers[EACH<T>];
    memcpy(numbers, &data, sizeof data);
    for (int each = 0; each < EACH<T>; each++)
        if (first + each < count) numbers[each] = x[first + each];
    memcpy(&data, numbers, sizeof data);
    return data;
}

template <class T>
__device__ inline void put_numbers(T* out, long long packet, long long count, Data data) {
    long long first = packet * EACH<T>;
    if (first + EACH<T> <= count) {
        *reinterpret_cast<Data*>(out + first) = data;
        return;
    }
    T numbers[EACH<T>];
    memcpy(numbers, &data, sizeof data);
    for (int each = 0; each < EACH<T>; each++)
        if (first + each < count) out[first + each] = numbers[each];
}

// The next kernel may start at once: all blocks of this one have started, and it waits for them before it reads. The epoch
// is read once earlier kernels are done, since one of them may be the exchange before.
__device__ inline Data begin_exchange(const Ranks& ranks) {
    launch_dependents();
    await_earlier_kernels();
    return *static_cast<volatile Data*>(&header(ranks, ranks.rank)->epochs[blockIdx.x]) + 1;
}

// Each block counts epochs for itself. All exchanges of a rank have the same number of blocks, so the counts agree. A
// count that blocks share could change only after all have read it, and an atomic would have to find the last one.
__device__ inline void end_exchange(const Ranks& ranks, Data epoch) {
    __syncthreads();
    if (threadIdx.x == 0) header(ranks, ranks.rank)->epochs[blockIdx.x] = epoch;
}

// This thread's share of packets begin … end - 1.
#define EACH_PACKET(index, begin, end)                                                                \
    for (long long index = (begin) + (long long)blockIdx.x * blockDim.x + threadIdx.x; index < (end); \
         index += (long long)gridDim.x * blockDim.x)

// Packets first … last - 1 of out [count] become the sums of all ranks' x [count]: each sends all of them to all.
template <class T>
__device__ inline void sum_at_once(const Ranks& ranks, const T* x, T* out, long long count, long long first,
                                   long long last) {
    Data epoch = begin_exchange(ranks);
    Patience patience;
    EACH_PACKET(packet, first, last) {
        Data own = numbers_of(x, packet, count);
        for (int to = 0; to < ranks.size; to++)
            if (to != ranks.rank) store_packet(slot(ranks, to, 0, ranks.rank, epoch) + packet - first, {own, epoch});
    }
    EACH_PACKET(packet, first, last) {
        Data own = numbers_of(x, packet, count);
        put_numbers(out, packet, count, add_up<T>(ranks, packet - first, own, epoch, patience));
    }
    end_exchange(ranks, epoch);
}

// The same: each rank adds up one part of them, and sends the sums to all.
template <class T>
__device__ inline void sum_by_parts(const Ranks& ranks, const T* x, T* out, long long count, long long first,
                                    long long last) {
    Data epoch = begin_exchange(ranks);
    Patience patience;
    int rank = ranks.rank, size = ranks.size;
    auto bound = [&](int of) { return first + (last - first) * of / size; };
    for (int to = 0; to < size; to++)
        if (to != rank) {
            Packet* target = slot(ranks, to, 0, rank, epoch) - bound(to);
            EACH_PACKET(packet, bound(to), bound(to + 1))
                store_packet(target + packet, {numbers_of(x, packet, count), epoch});
        }
    EACH_PACKET(packet, bound(rank), bound(rank + 1)) {
        long long index = packet - bound(rank);
        Data sum = add_up<T>(ranks, index, numbers_of(x, packet, count), epoch, patience);
        for (int to = 0; to < size; to++)
            if (to != rank) store_packet(slot(ranks, to, 1, rank, epoch) + index, {sum, epoch});
        put_numbers(out, packet, count, sum);
    }
    for (int from = 0; from < size; from++)
        if (from != rank) {
            const Packet* source = slot(ranks, rank, 1, from, epoch) - bound(from);
            EACH_PACKET(packet, bound(from), bound(from + 1))
                put_numbers(out, packet, count, receive(ranks, source + packet, epoch, patience));
        }
    end_exchange(ranks, epoch);
}

// Columns begin … begin + width - 1 of out [rows, columns] get a packet of a rank's x [rows, width].
template <class T>
__device__ inline void put_columns(T* out, long long packet, long long count, int width, int columns, int begin,
                                   Data data) {
    long long first = packet * EACH<T>, row = first / width, column = first - row * width;
    T* target = out + row * columns + begin + column;
    if (column + EACH<T> <= width && first + EACH<T> <= count && reinterpret_cast<Data>(target) % sizeof data == 0) {
        *reinterpret_cast<Data*>(target) = data;
        return;
    }
    T numbers[EACH<T>];
    memcpy(numbers, &data, sizeof data);
    for (int each = 0; each < EACH<T>; each++) {
        if (first + each >= count) return;
        out[row * columns + begin + column] = numbers[each];
        if (++column == width) column = 0, row++;
    }
}

// out [rows, columns] gets all ranks' x, in the order of ranks: of each rank part `part` of `parts` of its packets.
template <class T>
__device__ inline void gather(const Ranks& ranks, const T* x, T* out, int rows, int columns, int part, int parts) {
    Data epoch = begin_exchange(ranks);
    Patience patience;
    auto bound = [&](int of) { return (int)((long long)columns * of / ranks.size); };
    for (int step = 0; step < ranks.size; step++) {  // the own ones are sent first
        int from = (ranks.rank + step) % ranks.size, begin = bound(from), width = bound(from + 1) - begin;
        long long count = (long long)rows * width, packets = (count + EACH<T> - 1) / EACH<T>;
        long long first = packets * part / parts, last = packets * (part + 1) / parts;
        const Packet* source = slot(ranks, ranks.rank, 0, from, epoch) - first;
        EACH_PACKET(packet, first, last) {
            Data data;
            if (step == 0) {
                data = numbers_of(x, packet, count);
                for (int to = 0; to < ranks.size; to++)
                    if (to != from) store_packet(slot(ranks, to, 0, from, epoch) + packet - first, {data, epoch});
            } else {
                data = receive(ranks, source + packet, epoch, patience);
            }
            put_columns(out, packet, count, width, columns, begin, data);
        }
    }
    end_exchange(ranks, epoch);
}

#define SUM(how, name, type)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        how##_##name(const __grid_constant__ Ranks ranks, const type* x, type* out, long long count,               \
                     long long first, long long last) {                                                            \
        how(ranks, x, out, count, first, last);                                                                    \
    }
SUM(sum_at_once, float32, float)
SUM(sum_at_once, float16, __half)
SUM(sum_at_once, bfloat16, __nv_bfloat16)
SUM(sum_by_parts, float32, float)
SUM(sum_by_parts, float16, __half)
SUM(sum_by_parts, bfloat16, __nv_bfloat16)

#define SUM_STREAMED(most, name, type)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                       \
        sum_streamed_##most##_##name(const __grid_constant__ Ranks ranks, const Vector* x, Vector* out,            \
                                     long long count, int length) {                                                \
        sum_streamed<type, most>(ranks, {x, out, count, length});                                                  \
    }
#define SUMS_STREAMED(most)                     \
    SUM_STREAMED(most, float32, float)          \
    SUM_STREAMED(most, float16, __half)         \
    SUM_STREAMED(most, bfloat16, __nv_bfloat16)
SUMS_STREAMED(2)
SUMS_STREAMED(4)
SUMS_STREAMED(8)

#define GATHER(bytes, type)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        gather_##bytes(const __grid_constant__ Ranks ranks, const type* x, type* out, int rows, int columns,       \
                       int part, int parts) {                                                                      \
        gather(ranks, x, out, rows, columns, part, parts);                                                         \
    }
GATHER(2, unsigned short)
GATHER(4, unsigned)
