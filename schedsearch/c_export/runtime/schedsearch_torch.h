/* What the operators of an export take and return. Private to the files of an export. */
#ifndef SCHEDSEARCH_TORCH_H
#define SCHEDSEARCH_TORCH_H

// The oldest torch that loads the library. Torch keeps this interface in later versions.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 9) << 48))
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "schedsearch.h"

namespace schedsearch_torch {

// One way in which a tensor may hold an array: as it is in memory, or logically NCHW in channels_last.
struct Form {
    int64_t dims;
    int64_t sizes[8];
    int64_t strides[8];
};

struct Array {
    const char *name;
    int32_t (*dtype)();
    int forms;
    Form form[2];
};

struct Number {
    const char *name;
    char kind; // f: float32, d: float64, b: bool, i: an integer
    int64_t low, high; // of an integer
};

// An operator, whose arguments are arrays, then numbers.
struct Operator {
    const schedsearch_kernel *kernel;
    const Array *arguments;
    size_t argument_count;
    const Array *outputs;
    size_t output_count;
    const Number *numbers;
    size_t number_count;
};

extern const Operator operators[];

// Computes an operator on the device of its arguments, or, for meta tensors, only makes its outputs.
void compute(const Operator &op, StableIValue *stack, uint64_t arguments, uint64_t outputs);
void pretend(const Operator &op, StableIValue *stack, uint64_t arguments, uint64_t outputs);

template <int number>
void computed(StableIValue *stack, uint64_t arguments, uint64_t outputs)
{
    compute(operators[number], stack, arguments, outputs);
}

template <int number>
void pretended(StableIValue *stack, uint64_t arguments, uint64_t outputs)
{
    pretend(operators[number], stack, arguments, outputs);
}

} // namespace schedsearch_torch

#endif
