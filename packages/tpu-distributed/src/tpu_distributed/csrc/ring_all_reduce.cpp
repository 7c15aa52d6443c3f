// An all_reduce of arrays in the memory of hosts, around a ring of sockets (Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009).
//
// It is in C++ because it must not ask for the GIL while it runs: the thread that records ops would let it wait
// for 5 ms at every message.
#include "module.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace tpu {
namespace {

// What is reduced at once: it is still in the cache when it is.
constexpr int64_t kSegmentBytes = 1 << 18;

using Reduce = at::Tensor& (*)(at::Tensor&, const at::Tensor&, const at::Tensor&);

at::Tensor& add(at::Tensor& out, const at::Tensor& x, const at::Tensor& y) {
  return at::add_out(out, x, y);
}

Reduce reduce_of(const std::string& op) {
  if (op == "SUM") return add;
  if (op == "PRODUCT") return at::mul_out;
  if (op == "MIN") return at::minimum_out;
  if (op == "MAX") return at::maximum_out;
  throw py::value_error("ring_all_reduce: no reduce op " + op + ".");
}

// A failed system call.
struct SocketError final : std::exception {
  explicit SocketError(int error) : number(error) {}
  int number;
};

// A socket that stays open for as long as this lives: another thread that gives the group up may close its own
// descriptor, whose number is then another file's.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(dup(descriptor)) {
    if (descriptor_ < 0) throw SocketError(errno);
  }
  Socket(const Socket&) = delete;
  ~Socket() { close(descriptor_); }
  operator int() const { return descriptor_; }

 private:
  int descriptor_;
};

// The array is cut into as many parts as there are ranks. Rank r sends part r, and then each part that it has
// received and reduced with its own, to rank r + 1; after size - 1 parts what it receives is reduced by all.
// A byte of a part may be sent as soon as that byte was reduced.
class Ring {
 public:
  Ring(const at::Tensor& source, const at::Tensor& out, Reduce reduce, int rank, int size)
      : source_(source),
        out_(out),
        reduce_(reduce),
        rank_(rank),
        size_(size),
        part_elements_((source.numel() + size - 1) / size),
        segment_(
            at::empty(
                {std::min(part_elements_, kSegmentBytes / source.element_size())},
                source.options())) {}

  void run(int next, int previous, std::chrono::steady_clock::time_point deadline) {
    const int parts = 2 * (size_ - 1);
    while (sending_.part < parts || receiving_.part < parts) {
      const bool has_sent = sending_.part < parts && send_some(next);
      const bool has_received = receiving_.part < parts && receive_some(previous);
      if (!has_sent && !has_received) wait(next, previous, parts, deadline);
    }
  }

 private:
  // How far one of the two directions has come: bytes of a part.
  struct Position {
    int part = 0;
    int64_t bytes = 0;
  };

  // First byte and number of bytes of the part that is sent as the k-th, which is received as the one before.
  std::pair<int64_t, int64_t> part(int k) const {
    const int64_t index = ((rank_ - k) % size_ + size_) % size_;
    const int64_t begin = std::min(index * part_elements_, source_.numel());
    const int64_t end = std::min(begin + part_elements_, source_.numel());
    return {begin * source_.element_size(), (end - begin) * source_.element_size()};
  }

  // Bytes of the part that is being sent that have been there to send.
  int64_t sendable() const {
    const int64_t all = part(sending_.part).second;
    if (sending_.part == 0 || receiving_.part >= sending_.part) return all;
    return receiving_.part == sending_.part - 1 ? receiving_.bytes : 0;
  }

  bool send_some(int socket) {
    const auto [begin, bytes] = part(sending_.part);
    if (sending_.bytes == bytes) {
      sending_ = {sending_.part + 1, 0};
      return true;
    }
    const int64_t ready = sendable() - sending_.bytes;
    if (ready == 0) return false;
    const auto* from =
        static_cast<const char*>((sending_.part == 0 ? source_ : out_).const_data_ptr());
    const ssize_t sent =
        ::send(socket, from + begin + sending_.bytes, ready, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return may_try_again();
    sending_.bytes += sent;
    return true;
  }

  bool receive_some(int socket) {
    const auto [begin, bytes] = part(receiving_.part + 1);
    if (receiving_.bytes == bytes) {
      receiving_ = {receiving_.part + 1, 0};
      return true;
    }
    const bool reduces = receiving_.part < size_ - 1;
    const int64_t left = bytes - receiving_.bytes;
    const int64_t wanted = reduces ? std::min<int64_t>(left, segment_.nbytes()) : left;
    auto* to = reduces ? static_cast<char*>(segment_.data_ptr()) + filled_
                       : static_cast<char*>(out_.data_ptr()) + begin + receiving_.bytes;
    const ssize_t received = ::recv(socket, to, wanted - filled_, MSG_DONTWAIT);
    if (received == 0) throw SocketError(ECONNRESET);
    if (received < 0) return may_try_again();
    if (!reduces) {
      receiving_.bytes += received;
      return true;
    }
    filled_ += received;
    if (filled_ == wanted) {
      const int64_t first = (begin + receiving_.bytes) / source_.element_size();
      const int64_t elements = wanted / source_.element_size();
      at::Tensor out = out_.narrow(0, first, elements);
      reduce_(out, source_.narrow(0, first, elements), segment_.narrow(0, 0, elements));
      receiving_.bytes += wanted;
      filled_ = 0;
    }
    return true;
  }

  static bool may_try_again() {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) throw SocketError(errno);
    return false;
  }

  void wait(
      int next, int previous, int parts, std::chrono::steady_clock::time_point deadline) const {
    const bool sends = sending_.part < parts && sendable() > sending_.bytes;
    pollfd sockets[] = {
        {sends ? next : -1, POLLOUT, 0}, {receiving_.part < parts ? previous : -1, POLLIN, 0}};
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) throw SocketError(ETIMEDOUT);
    const int ready =
        poll(sockets, 2, static_cast<int>(std::min<int64_t>(left.count(), INT32_MAX)));
    if (ready >= 0) return;
    if (errno != EINTR) throw SocketError(errno);
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw PythonError::current();
  }

  const at::Tensor source_, out_;
  const Reduce reduce_;
  const int rank_, size_;
  const int64_t part_elements_;
  const at::Tensor segment_;
  int64_t filled_ = 0;  // bytes of the segment
  Position sending_, receiving_;
};

// Reduces `elements` at the address `source`, times `factor`, over all ranks into `out`, which may be the same,
// and divides by `divisor`.
void ring_all_reduce(
    uintptr_t source, uintptr_t out, int64_t elements, py::handle dtype, const std::string& op,
    double factor, int divisor, int rank, int size, int next, int previous, double seconds) {
  const Reduce reduce = reduce_of(op);
  const auto type = py::cast<at::ScalarType>(dtype);
  int error = 0;
  try {
    py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto limit = std::chrono::duration<double>(std::min(seconds, 1e9));
    const auto deadline = std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit);
    at::Tensor from = at::from_blob(reinterpret_cast<void*>(source), {elements}, type);
    at::Tensor to = at::from_blob(reinterpret_cast<void*>(out), {elements}, type);
    if (factor != 1.0) from = at::mul_out(to, from, at::scalar_tensor(factor, type));
    const Socket next_socket(next), previous_socket(previous);
    Ring(from, to, reduce, rank, size).run(next_socket, previous_socket, deadline);
    if (divisor != 1) to.div_(divisor);
  } catch (const SocketError& failed) {
    error = failed.number;
  }
  if (error == 0) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

}  // namespace

void register_ring_all_reduce(py::module_& m) { m.def("ring_all_reduce", &ring_all_reduce); }

}  // namespace tpu
