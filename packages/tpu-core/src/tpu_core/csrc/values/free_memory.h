// A limit on memory that is free in the C library's heap and still the process's.
//
// With the heap told to keep all blocks (`tpu_core.pjrt.host_memory`), glibc before 2.38 seldom fits an
// aligned block into the hole that one of its size has left: a chain of ops on large tensors would hold
// several times what it needs.
#pragma once

#include <cstddef>

namespace tpu {

// Bytes that may be free; 0, as at first, is no limit.
void limit_free_memory(size_t bytes);
// A value of so many bytes was made: now and then more than the limit goes back to the system.
void note_made(size_t nbytes);

}  // namespace tpu
