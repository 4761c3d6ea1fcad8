/* CUDA's driver as far as areas.py calls it, on the host: an allocation is a memory file, and a handle names its process
   and its descriptor, with zero bytes in between, as real ones have. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 64
#define LAZY_PEER_ACCESS 1
enum { OK = 0, INVALID = 1, NO_PEER_ACCESS = 217 };

typedef struct { char bytes[64]; } Handle;
typedef struct { int32_t pid, fd; int64_t size; } Inside;
static struct { uint64_t address; int fd; size_t size; int is_open; } known[MOST];
static int count;
int num_open, num_allocated, refuses; /* a test reads or sets them */

static int map(int fd, size_t size, int is_open, uint64_t *address) {
  void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (found == MAP_FAILED || count == MOST) return INVALID;
  known[count].address = *address = (uint64_t)found;
  known[count].fd = fd, known[count].size = size, known[count].is_open = is_open;
  ++count;
  return OK;
}

static int find(uint64_t address) {
  for (int one = 0; one < count; ++one)
    if (known[one].address == address) return one;
  return -1;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
  int fd = memfd_create("fake-cuda", 0);
  if (fd < 0 || ftruncate(fd, size)) return INVALID;
  ++num_allocated;
  if (map(fd, size, 0, address)) return INVALID;
  memset((void *)*address, 0xEE, size);
  return OK;
}

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
  int one = find(address);
  if (one < 0 || known[one].size < size) return INVALID;
  memset((void *)address, value, size);
  return OK;
}

int cuCtxSynchronize(void) { return OK; }

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  int one = find(address);
  if (one < 0) return INVALID;
  Inside inside = {getpid(), known[one].fd, (int64_t)known[one].size};
  memset(handle, 0, sizeof *handle);
  memcpy(handle->bytes + 40, &inside, sizeof inside);
  return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned int flags) {
  char path[64];
  Inside inside;
  if (refuses) return NO_PEER_ACCESS;
  if (flags != LAZY_PEER_ACCESS) return INVALID;
  memcpy(&inside, handle.bytes + 40, sizeof inside);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", inside.pid, inside.fd);
  int fd = open(path, O_RDWR);
  if (fd < 0) return INVALID;
  int status = map(fd, inside.size, 1, address);
  close(fd);
  num_open += !status;
  return status;
}

int cuIpcCloseMemHandle(uint64_t address) {
  int one = find(address);
  if (one < 0 || !known[one].is_open) return INVALID;
  munmap((void *)address, known[one].size);
  known[one].address = 0;
  --num_open;
  return OK;
}
