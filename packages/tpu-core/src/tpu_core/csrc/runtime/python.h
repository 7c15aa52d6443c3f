// Calls from the extension into Python, all through one table of callbacks.
#pragma once

#include <tpu_core/python.h>

namespace tpu {

// The function registered under `name` by `tpu_core.runtime`.
Function callback(const char* name);
void set_callbacks(py::dict table);

// Starts the runtime (`tpu_core.runtime.initialize`) on the device's first use. Raises in a forked child.
void ensure_initialized();
bool is_initialized();
bool in_bad_fork();

int16_t current_device();
void set_current_device(int16_t device);
int16_t device_count();

}  // namespace tpu
