/* Memory for tensors in which an access out of bounds is seen. Loaded with LD_PRELOAD.
 *
 * torch takes the memory of its CPU tensors from posix_memalign. While guarding is on, each such block lies in a slot
 * of its own: 48 GiB of address space of which only the block's own pages can be touched. So an index that is off by
 * less than 48 GiB, and any use after it was freed, ends in SIGSEGV. What is left of the block's pages is filled with a
 * pattern, which guarded_check() compares, and so does free().
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SLOT (48ULL << 30)
#define SLOTS 1024
#define LARGEST (64ULL << 20)
#define PAGE 4096ULL
#define PATTERN 0xA5

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_malloc(size_t);

struct slot { char *pages; size_t mapped; char *block; size_t bytes; };
static struct slot slots[SLOTS];
static char *arena;
static int on, at_start, next, spoiled;
static volatile int lock;

static void hold(void) { while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) {} }
static void release(void) { __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); }

/* Turn guarding on or off for blocks from now on; blocks lie at the start of their pages, or else at the end. */
int guarded_set(int enabled, int start) {
  if (!arena) {
    arena = mmap(NULL, SLOT * SLOTS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) { arena = NULL; return -1; }
  }
  on = enabled;
  at_start = start;
  return 0;
}

static int intact(struct slot *slot) {
  char *end = slot->pages + slot->mapped;
  for (char *at = slot->pages; at < slot->block; at++) if ((unsigned char)*at != PATTERN) return 0;
  for (char *at = slot->block + slot->bytes; at < end; at++) if ((unsigned char)*at != PATTERN) return 0;
  return 1;
}

/* How many blocks were written beside since the last call, those in use and those freed since. */
int guarded_check(void) {
  hold();
  int found = spoiled;
  spoiled = 0;
  for (int index = 0; index < SLOTS; index++) if (slots[index].pages && !intact(&slots[index])) found++;
  release();
  return found;
}

static void *guarded(size_t align, size_t bytes) {
  size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
  if (mapped == 0) mapped = PAGE;
  size_t unit = align > 64 ? align : 16;
  hold();
  for (int tries = 0; tries < SLOTS; tries++) {
    struct slot *slot = &slots[next];
    char *pages = arena + SLOT * next + SLOT / 2 / PAGE * PAGE;
    next = (next + 1) % SLOTS;
    if (slot->pages) continue;
    if (mprotect(pages, mapped, PROT_READ | PROT_WRITE)) break;
    memset(pages, PATTERN, mapped);
    slot->block = at_start ? pages : pages + (mapped - bytes) / unit * unit;
    slot->pages = pages;
    slot->mapped = mapped;
    slot->bytes = bytes;
    release();
    return slot->block;
  }
  release();
  return NULL;
}

static struct slot *slot_of(void *pointer) {
  if (!arena || (char *)pointer < arena || (char *)pointer >= arena + SLOT * SLOTS) return NULL;
  return &slots[((char *)pointer - arena) / SLOT];
}

int posix_memalign(void **out, size_t align, size_t bytes) {
  void *found;
  if (on) {
    if (bytes > LARGEST) return ENOMEM;
    found = guarded(align, bytes);
  } else {
    found = __libc_memalign(align, bytes);
  }
  if (!found) return ENOMEM;
  *out = found;
  return 0;
}

void free(void *pointer) {
  struct slot *slot = slot_of(pointer);
  if (!slot) { __libc_free(pointer); return; }
  hold();
  if (!slot->pages || slot->block != pointer) { release(); __builtin_trap(); }
  if (!intact(slot)) spoiled++;
  madvise(slot->pages, slot->mapped, MADV_DONTNEED);
  mprotect(slot->pages, slot->mapped, PROT_NONE);
  slot->pages = NULL;
  release();
}

void *realloc(void *pointer, size_t bytes) {
  struct slot *slot = slot_of(pointer);
  if (!slot) return __libc_realloc(pointer, bytes);
  void *found = __libc_malloc(bytes);
  if (!found) return NULL;
  memcpy(found, pointer, bytes < slot->bytes ? bytes : slot->bytes);
  free(pointer);
  return found;
}
