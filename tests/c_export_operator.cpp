// Calls an operator of libschedsearch_torch.so without Python, on float16 tensors that nobody has filled.
//
//     operator LIBRARY NAME DEVICE SHAPE...        e.g. cuda 2,14,14,64 64,3,3,64 64
//
// It prints the shape of the output. Like the library, it uses torch's stable ABI only.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 9) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <vector>

using torch::stable::Tensor;

// Torch's own macro for it has another name in 2.13 than before.
static void check(AOTITorchError code)
{
    if (code != AOTI_TORCH_SUCCESS)
        throw std::runtime_error("a call of torch failed; it said why above");
}

static Tensor empty(const char *shape, int32_t device_type)
{
    std::vector<int64_t> sizes, strides;
    std::stringstream text(shape);
    for (std::string extent; std::getline(text, extent, ',');)
        sizes.push_back(std::stoll(extent));
    int64_t step = 1;
    strides.resize(sizes.size());
    for (size_t i = sizes.size(); i-- > 0;) {
        strides[i] = step;
        step *= sizes[i];
    }
    AtenTensorHandle made = nullptr;
    check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                   aoti_torch_dtype_float16(), device_type, 0, &made));
    return Tensor(made);
}

int main(int count, char **words)
{
    if (count < 5 || !dlopen(words[1], RTLD_NOW)) {
        std::fprintf(stderr, "%s\n", count < 5 ? "too few arguments" : dlerror());
        return 1;
    }
    int32_t device_type = std::strcmp(words[3], "cuda") ? aoti_torch_device_type_meta() : aoti_torch_device_type_cuda();
    std::vector<StableIValue> stack;
    for (int i = 4; i < count; i++)
        stack.push_back(torch::stable::detail::from(empty(words[i], device_type)));
    check(aoti_torch_call_dispatcher(words[2], "", stack.data()));
    Tensor y = torch::stable::detail::to<Tensor>(stack[0]);
    for (int64_t i = 0; i < y.dim(); i++)
        std::printf("%lld ", static_cast<long long>(y.size(i)));
    std::printf("\n");
    return 0;
}
