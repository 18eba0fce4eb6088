// Calls an operator of torch from a program of XLA, without Python.
//
// The custom call has the operator's name and a text with its arguments. torch's dispatcher runs the operator's kernel on
// XLA's stream, on tensors that share the memory of XLA's buffers. Results that the operator does not write into a
// buffer itself are copied into it. Compiled on the user's machine by operator_lane.py, which says what the text means.

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/InferenceMode.h>
#ifdef ATTN_CORE_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

at::ScalarType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F64: return at::kDouble;
    case ffi::DataType::F32: return at::kFloat;
    case ffi::DataType::F16: return at::kHalf;
    case ffi::DataType::BF16: return at::kBFloat16;
    case ffi::DataType::S64: return at::kLong;
    case ffi::DataType::S32: return at::kInt;
    case ffi::DataType::S8: return at::kChar;
    case ffi::DataType::U8: return at::kByte;
    case ffi::DataType::PRED: return at::kBool;
    default: throw std::runtime_error("a buffer has a dtype that torch's kernels do not take");
  }
}

at::Tensor tensor_of(const ffi::AnyBuffer& buffer, c10::Device device) {
  auto dimensions = buffer.dimensions();
  std::vector<int64_t> sizes(dimensions.begin(), dimensions.end());
  return at::from_blob(buffer.untyped_data(), sizes,
                       at::TensorOptions().dtype(dtype_of(buffer.element_type())).device(device));
}

// Returns the operator's arguments. A word is one argument: "tN" buffer N, "n" None, "iN" an int, "fX" a float, "b0" or
// "b1" a bool.
std::vector<c10::IValue> arguments_of(std::string_view text, const std::vector<at::Tensor>& tensors) {
  std::vector<c10::IValue> stack;
  std::istringstream words{std::string(text)};
  std::string word;
  while (words >> word) {
    std::string rest = word.substr(1);
    switch (word[0]) {
      case 't': stack.emplace_back(tensors.at(std::stoul(rest))); break;
      case 'n': stack.emplace_back(); break;
      case 'i': stack.emplace_back(static_cast<int64_t>(std::stoll(rest))); break;
      case 'f': stack.emplace_back(std::stod(rest)); break;
      case 'b': stack.emplace_back(rest == "1"); break;
      default: throw std::runtime_error("unknown word in the arguments of an operator: " + word);
    }
  }
  return stack;
}

// copies: words "result:buffer", the results that are copied into a buffer.
void run(std::string_view name, std::string_view overload, std::string_view arguments, std::string_view copies,
         const std::vector<at::Tensor>& tensors, c10::DispatchKey key) {
  c10::InferenceMode guard;  // no autograd, whatever the thread's mode is
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(std::string(name).c_str(), std::string(overload).c_str());
  auto stack = arguments_of(arguments, tensors);
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  std::istringstream words{std::string(copies)};
  std::string word;
  while (words >> word) {
    size_t colon = word.find(':');
    const at::Tensor& result = stack.at(std::stoul(word.substr(0, colon))).toTensor();
    at::Tensor buffer = tensors.at(std::stoul(word.substr(colon + 1)));
    if (result.sizes() != buffer.sizes() || result.scalar_type() != buffer.scalar_type())
      throw std::runtime_error("an operator returned a result of another shape or dtype than its buffer");
    buffer.copy_(result);
  }
}

ffi::Error call(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name, std::string_view overload,
                std::string_view arguments, std::string_view copies, c10::Device device, c10::DispatchKey key) {
  try {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < args.size(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      tensors.push_back(tensor_of(buffer.value(), device));
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      tensors.push_back(tensor_of(*buffer.value(), device));
    }
    run(name, overload, arguments, copies, tensors, key);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(name) + ": " + error.what());
  }
  return ffi::Error::Success();
}

ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name, std::string_view overload,
                  std::string_view arguments, std::string_view copies) {
  return call(args, rets, name, overload, arguments, copies, c10::Device(c10::kCPU), c10::DispatchKey::CPU);
}

#ifdef ATTN_CORE_CUDA
ffi::Error on_gpu(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  std::string_view name, std::string_view overload, std::string_view arguments,
                  std::string_view copies) {
  auto device = static_cast<c10::DeviceIndex>(ordinal);
  c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device));
  return call(args, rets, name, overload, arguments, copies, c10::Device(c10::kCUDA, device), c10::DispatchKey::CUDA);
}
#endif

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_core_operator_cpu, on_cpu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("overload")
                                  .Attr<std::string_view>("arguments")
                                  .Attr<std::string_view>("copies"));

#ifdef ATTN_CORE_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_core_operator_gpu, on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("overload")
                                  .Attr<std::string_view>("arguments")
                                  .Attr<std::string_view>("copies"));
#endif
