/* A few threads that share out the pieces of one short job, some 20 to 1000 µs; see crew.c. */
#ifndef TANDEM_CREW_H
#define TANDEM_CREW_H

#include <stdint.h>

typedef void (*Piece)(const void *job, int32_t index);

/* What a library compiled elsewhere sees of a crew: run(crew, piece, job, count) calls piece(job, i) for every i below
 * count, in any order, on any of crew->threads threads, and returns when all are done. */
typedef struct Crew {
    void (*run)(struct Crew *crew, Piece piece, const void *job, int32_t count);
    int32_t threads; /* that may work at a time, the caller's included */
} Crew;

#define RUN(crew, piece, job, count) ((crew)->run((crew), (piece), (job), (count)))

#endif
