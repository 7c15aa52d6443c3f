// Errors that follow from values, such as an index out of range. The node of an op that is checked has one
// output more, a word of two int64: which of its checks failed, counted from 1, or 0, and the value that is
// to blame. The words of a segment become one, an output of its program like any other, which the next read
// of what the device has computed by then looks at.
#pragma once

#include "recorder/trace.h"

namespace tpu {

// Of the first number of a word: the place of a node among those of the word stands above the number of its
// check.
constexpr int kNodeShift = 20;

// Which ops are checked (TPU_CHECKS): none, where it is cheap, or all that can be.
void set_checks(int level);
// The same for this thread: a mode that inspects ops looks for itself.
int checks();
// The layout of a word.
const Layout& word_layout();
// Makes one word of those of the segment that is about to be cut. Needs g_mutex.
void close_checks(Trace& trace);
// Whether `close_checks` made a node.
bool combines_words(const Node& node);
// Leaves the words that such a node was to combine one an op, as where a segment runs in parts: combining
// them would be another program for each number of them. Needs g_mutex.
void separate_words(const Segment& s, const Node& node);
// The recipe of a node that `close_checks` made is Python's to give. Needs the GIL.
py::object plan_of(const Node& node);

// Counts programs as they start; a value knows the number at its making, see `Value::launch`.
uint64_t next_launch();
uint64_t launches();
// The words that a segment makes which no read has looked at. Needs g_mutex.
std::vector<ValuePtr> words_of(const Segment& s);
// Has reads of what a launch made look at words that a later one makes: those of a segment that runs in
// parts. Needs g_mutex.
void date_words(const std::vector<ValuePtr>& words, uint64_t launch);
// Raises what programs up to a launch found; the first of them if there are several. Waits for none that
// started later. g_mutex is not held.
void raise_checks(int16_t device, uint64_t launch);
// Drops the words of programs that are done and found nothing, once there are many. Holds the GIL.
void sweep_checks(int16_t device);

}  // namespace tpu
