// Operators of PyTorch for exported kernels, through torch's stable ABI: no Python, and any torch from 2.9 on.
//
// Outputs and workspaces come from torch's allocator, and kernels run on torch's current stream.
#include "schedsearch_torch.h"

#include <torch/csrc/stable/accelerator.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// A torch without CUDA does not have it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

extern "C" {
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxSetCurrent(void *context);
}

namespace schedsearch_torch {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

[[noreturn]] void refuse(const Operator &op, const std::string &text)
{
    throw std::runtime_error(std::string(op.kernel->name) + ": " + text);
}

void check(AOTITorchError code, const Operator &op, const char *what)
{
    if (code != AOTI_TORCH_SUCCESS)
        refuse(op, what);
}

template <class Numbers>
std::string shown(const Numbers &numbers, int64_t count)
{
    std::ostringstream text;
    text << "(";
    for (int64_t i = 0; i < count; i++)
        text << (i ? ", " : "") << numbers[i];
    text << ")";
    return text.str();
}

bool matches(const Form &form, const Tensor &tensor)
{
    if (tensor.dim() != form.dims)
        return false;
    for (int64_t i = 0; i < form.dims; i++)
        if (tensor.size(i) != form.sizes[i] || (form.sizes[i] != 1 && tensor.stride(i) != form.strides[i]))
            return false;
    return true;
}

// The number of the form in which a tensor holds an array.
int form_of(const Operator &op, const Array &array, const Tensor &tensor)
{
    int32_t dtype = 0;
    check(aoti_torch_get_dtype(tensor.get(), &dtype), op, "the dtype of an argument cannot be read");
    if (dtype != array.dtype())
        refuse(op, std::string(array.name) + " has another dtype than the kernel takes; see its description");
    for (int i = 0; i < array.forms; i++)
        if (matches(array.form[i], tensor))
            return i;
    std::string allowed;
    for (int i = 0; i < array.forms; i++)
        allowed += (i ? " or " : "") + std::string("shape ") + shown(array.form[i].sizes, array.form[i].dims) +
                   " with strides " + shown(array.form[i].strides, array.form[i].dims);
    refuse(op, std::string(array.name) + " has shape " + shown(tensor.sizes(), tensor.dim()) + " with strides " +
                   shown(tensor.strides(), tensor.dim()) + "; allowed: " + allowed);
}

Tensor empty(const Operator &op, const Form &form, int32_t dtype, int32_t device_type, int32_t device)
{
    AtenTensorHandle made = nullptr;
    check(aoti_torch_empty_strided(form.dims, form.sizes, form.strides, dtype, device_type, device, &made), op,
          "there is no memory for an output or workspace");
    return Tensor(made);
}

struct Call {
    std::vector<Tensor> arguments, outputs;
    std::vector<schedsearch_scalar> numbers;
    int32_t device_type = 0, device = 0;
};

schedsearch_scalar number(const Operator &op, const Number &number, StableIValue value)
{
    schedsearch_scalar made;
    made.bits = 0;
    if (number.kind == 'i' && (to<int64_t>(value) < number.low || to<int64_t>(value) > number.high))
        refuse(op, std::string(number.name) + " is " + std::to_string(to<int64_t>(value)) + "; allowed: " +
                       std::to_string(number.low) + " to " + std::to_string(number.high));
    if (number.kind == 'f')
        made.float32 = static_cast<float>(to<double>(value));
    else if (number.kind == 'd')
        made.float64 = to<double>(value);
    else if (number.kind == 'b')
        made.boolean = to<bool>(value) ? 1 : 0;
    else
        made.int64 = to<int64_t>(value); // little-endian: narrower formats are its first bytes
    return made;
}

Call take(const Operator &op, StableIValue *stack, uint64_t arguments, uint64_t outputs)
{
    Call call;
    for (size_t i = 0; i < op.argument_count; i++) // takes ownership first, so that nothing leaks if one is refused
        call.arguments.push_back(to<Tensor>(stack[i]));
    if (arguments != op.argument_count + op.number_count || outputs != op.output_count)
        refuse(op, "the schema has other arguments than the kernel");
    for (size_t i = 0; i < op.number_count; i++)
        call.numbers.push_back(number(op, op.numbers[i], stack[op.argument_count + i]));
    int held = 0;
    for (size_t i = 0; i < op.argument_count; i++) {
        int32_t device_type = 0;
        std::string missing = std::string(op.arguments[i].name) + " is None, or has no device; give a tensor";
        check(aoti_torch_get_device_type(call.arguments[i].get(), &device_type), op, missing.c_str());
        if (i == 0) {
            call.device_type = device_type;
            call.device = call.arguments[0].get_device_index();
        }
        if (device_type != call.device_type || call.arguments[i].get_device_index() != call.device)
            refuse(op, std::string(op.arguments[i].name) + " is on another device than " + op.arguments[0].name);
        int form = form_of(op, op.arguments[i], call.arguments[i]);
        held = i ? held : form;
    }
    for (size_t i = 0; i < op.output_count; i++) {
        const Array &output = op.outputs[i];
        const Form &form = output.form[held < output.forms ? held : 0];
        call.outputs.push_back(empty(op, form, output.dtype(), call.device_type, call.device));
    }
    return call;
}

void give(const Call &call, StableIValue *stack)
{
    for (size_t i = 0; i < call.outputs.size(); i++)
        stack[i] = from(call.outputs[i]);
}

// A thread that has not used the GPU yet has no current context; torch's is the primary one.
int with_context(int32_t device)
{
    int handle = 0;
    void *context = nullptr;
    int code = cuDeviceGet(&handle, device);
    if (code == 0)
        code = cuDevicePrimaryCtxRetain(&context, handle);
    if (code == 0) {
        code = cuCtxSetCurrent(context);
        cuDevicePrimaryCtxRelease_v2(handle); // torch retains it
    }
    return code;
}

} // namespace

void compute(const Operator &op, StableIValue *stack, uint64_t arguments, uint64_t outputs)
{
    Call call = take(op, stack, arguments, outputs);
    torch::stable::accelerator::DeviceGuard guard(call.device);
    void *stream = nullptr;
    if (!aoti_torch_get_current_cuda_stream)
        refuse(op, "this torch has no CUDA, or the library was not linked with libtorch_cuda");
    check(aoti_torch_get_current_cuda_stream(call.device, &stream), op, "torch has no current stream");
    std::vector<const void *> pointers;
    for (const Tensor &tensor : call.arguments)
        pointers.push_back(tensor.data_ptr());
    for (const Tensor &tensor : call.outputs)
        pointers.push_back(tensor.data_ptr());
    void *workspace = nullptr;
    Tensor memory;
    if (op.kernel->workspace_bytes) {
        Form bytes = {1, {static_cast<int64_t>(op.kernel->workspace_bytes)}, {1}};
        memory = empty(op, bytes, aoti_torch_dtype_uint8(), call.device_type, call.device);
        workspace = memory.data_ptr();
    }
    const schedsearch_scalar *numbers = call.numbers.empty() ? nullptr : call.numbers.data();
    CUstream on = static_cast<CUstream>(stream);
    int code = schedsearch_run(op.kernel, on, pointers.data(), numbers, workspace);
    if (code == SCHEDSEARCH_NO_CONTEXT && with_context(call.device) == 0)
        code = schedsearch_run(op.kernel, on, pointers.data(), numbers, workspace);
    if (code != SCHEDSEARCH_OK)
        refuse(op, schedsearch_error_text(code));
    give(call, stack);
}

void pretend(const Operator &op, StableIValue *stack, uint64_t arguments, uint64_t outputs)
{
    give(take(op, stack, arguments, outputs), stack);
}

} // namespace schedsearch_torch
