// What one call of an op contributes to its signature and node.
#pragma once

#include "recorder/record.h"
#include "recorder/trace.h"

#include <array>
#include <forward_list>
#include <memory>
#include <utility>

namespace tpu {

// How an operand is read from, or a result written to, its storage's value.
enum class Form : uint8_t { Whole, Slice, General };

struct Access {
  Form form = Form::Whole;
  const at::Tensor* tensor = nullptr;
  Cell* cell = nullptr;
  ValuePtr value;
  c10::SmallVector<int8_t, 6> dims;  // Slice: for each base dim the tensor's dim, or -1
  int chained = -1;         // a write into the same storage as this earlier write of the same op
  bool overwrites = false;  // a write that leaves nothing of the old value
};

// Everything one call contributes to its signature and node.
struct Call {
  Hasher hasher;
  c10::SmallVector<Access, 4> reads;
  c10::SmallVector<Access, 2> writes;
  c10::SmallVector<uint64_t, 8> numbers;
  c10::SmallVector<Pack, 8> packs;
  c10::SmallVector<uint8_t, 8> compiled_in;
  std::forward_list<at::Tensor> moved;  // CPU operands copied to the device
  int16_t device = -1;
  uint64_t jax_settings = 0;  // of an op that traces a JAX function
  bool wide = false;          // a 64-bit float takes part: float numbers keep their width
  at::Generator draw;         // of a random op: what its numbers were drawn from
};

// Reads the arguments of a call: signature, operands, numbers. Needs g_mutex.
void gather(Call& c, const OpDescription& d, const c10::IValue* args, size_t n);
// Seed and offset of a random op, advancing the generator.
std::pair<uint64_t, uint64_t> draw_seed(
    Call& c, const OpDescription& d, const c10::IValue* args, size_t n);
// Both as the numbers of a node.
std::array<uint64_t, 4> seed_words(std::pair<uint64_t, uint64_t> seed_and_offset);
// Adds seed and offset of a random op to the numbers, advancing the generator.
void add_seed(Call& c, const OpDescription& d, const c10::IValue* args, size_t n);
void hash_layout(Hasher& h, const Layout& l);
// Lifted numbers are no part of the signature, but whether PyTorch takes them is: a number that does not
// fit the dtype of an operand, divides integers by zero, or lies outside the bounds of its argument, makes
// another signature, about which Python is asked.
void hash_refusable(Call& c, const OpDescription& d, const c10::IValue* args);
// Whether a gradient has the shape of the window that the numbers say. `fits` in recorder/windows.py says
// the same.
bool window_fits(const c10::IValue* args, size_t n);
// Sets the storage's value of an operand and the form of its access, and hashes both. Needs g_mutex.
void resolve_access(Call& c, Access& a);
inline void add_number(Call& c, uint64_t bits, Pack pack, bool compiled_in) {
  c.numbers.push_back(bits);
  c.packs.push_back(pack);
  c.compiled_in.push_back(compiled_in);
}
// Asks PyTorch's meta function about a call: it checks the call and gives the outputs' geometry. g_mutex is
// not held.
std::unique_ptr<Signature> ask_for_signature(
    const OpDescription& d, const Call& c, const c10::IValue* args, size_t n);
// Has Python give an out= tensor the shape of the result.
void resize_outputs(const Signature& s, const c10::IValue* args, size_t n);
// Bytes take dtype and shape at their first typed use, so that a restored model has the same programs
// as a fresh one.
void settle_type(Value& v, const at::Tensor& t);
// Overrides the float32 matmul precision of this thread; -1 follows PyTorch's setting.
void set_thread_precision(int precision);
// Digest of the implementations that the user chose for ops: part of every signature; 0 is none.
void set_implementations(uint64_t digest);
bool has_chosen_implementations();
// Whether the tensor is exactly its storage's value: same dtype, sizes and order.
bool is_whole(const at::Tensor& t);

}  // namespace tpu
