// Address space, allocators and memory statistics of the device.
#pragma once

#include "values/value.h"

#include <c10/core/Allocator.h>

#include <utility>
#include <vector>

namespace tpu {

void free_cell(void* context);  // deleter of every device DataPtr; the context is a Cell

// A DataPtr of reserved, inaccessible address space of the value's size, holding the value.
c10::DataPtr allocate(ValuePtr value);
// The same with an uninitialised value.
c10::DataPtr allocate(size_t nbytes, int16_t device, const Layout& layout);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* ptr);
int16_t device_of_address(const void* ptr);  // -1 where the address is not ours

Cell* cell_of_address(const void* ptr);  // the live storage that starts there, or null
std::vector<ValuePtr> live_values();     // of every storage
// Each storage of a device with its value; those without a byte are left out.
std::vector<std::pair<const Cell*, ValuePtr>> live_cells(int16_t device);

// Statistics: `bytes` enter (or leave) device memory; `note_peak` counts what a program held while it ran.
void account(int16_t device, int64_t bytes, const void* value);
void note_peak(int16_t device, int64_t bytes);
int64_t allocated_bytes(int16_t device);
void note_out_of_memory(int16_t device, int64_t needed, int64_t free_bytes);

// Whether a limit is set: memory is checked before it is taken.
void set_memory_checked(bool is_checked);
bool memory_is_checked();
// Raises OutOfMemoryError where `nbytes` more exceed the limit. g_mutex must not be held.
void require_memory(int16_t device, int64_t nbytes);

// Whether a cell is still that of the storage which had it at `generation`.
bool is_of(const Cell* cell, uint32_t generation);
// Swaps the cell's value for another, if it is `current` and the storage's of `generation`.
bool put_value(Cell* cell, uint32_t generation, const Value* current, ValuePtr& value);

// Changes a storage's size: contents are kept up to the smaller size, as `UntypedStorage.resize_` does.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

void register_allocators();

}  // namespace tpu
