#include "module.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of tpu_distributed: the c10d backend and the ring of hosts.";
  tpu::import_core();
  tpu::register_process_group(m);
  tpu::register_ring_all_reduce(m);
}
