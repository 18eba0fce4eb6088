// Runs operators of torch from a program of XLA, without Python.
//
// The custom call has a text with one operator on each line; operator_recorder.py wrote it and says what it means. torch's
// dispatcher runs the operators on XLA's stream, on tensors that share the memory of XLA's buffers. Two operators are
// defined here: one launches a compiled kernel that is no operator of torch, one pauses. Compiled on the user's machine
// by operator_lane.py.

#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/DLConvertor.h>
#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#ifdef ATTN_CORE_CUDA
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// TVM's foreign function interface, as in its c_api.h and c_env_api.h.
struct TvmAny {
  int32_t type_index;
  uint32_t padding;
  void* value;
};
constexpr int32_t kTensorPointer = 7;  // kTVMFFIDLTensorPtr
using TvmCall = int (*)(void* function, TvmAny* arguments, int32_t count, TvmAny* result);
using TvmSetStream = int (*)(int32_t device_type, int32_t device_id, void* stream, void** original);

std::mutex kernels_mutex;
std::unordered_map<std::string, void*> kernels;  // functions of TVM by their names in XLA
TvmCall tvm_call = nullptr;
TvmSetStream tvm_set_stream = nullptr;

DLTensor dl_tensor_of(const at::Tensor& tensor) {
  DLTensor result{};
  bool on_gpu = tensor.is_cuda();
  result.data = tensor.data_ptr();
  result.device = {on_gpu ? kDLCUDA : kDLCPU, on_gpu ? tensor.get_device() : 0};
  result.ndim = static_cast<int32_t>(tensor.dim());
  result.dtype = at::getDLDataType(tensor);
  result.shape = const_cast<int64_t*>(tensor.sizes().data());
  result.strides = const_cast<int64_t*>(tensor.strides().data());
  return result;
}

// Launches a kernel on tensors: those that it reads, and then those that it writes.
void launch(c10::string_view kernel, at::TensorList reads, at::TensorList writes) {
  void* function = nullptr;
  {
    std::lock_guard<std::mutex> lock(kernels_mutex);
    auto found = kernels.find(std::string(kernel));
    TORCH_CHECK(found != kernels.end(), "the kernel ", kernel, " is unknown in this process; trace the program here");
    function = found->second;
  }
  std::vector<DLTensor> tensors;
  for (at::TensorList list : {reads, writes})
    for (const at::Tensor& tensor : list) tensors.push_back(dl_tensor_of(tensor));
  std::vector<TvmAny> arguments;
  for (DLTensor& tensor : tensors) arguments.push_back({kTensorPointer, 0, &tensor});
  void* original = nullptr;
#ifdef ATTN_CORE_CUDA
  bool on_gpu = !writes.empty() && writes[0].is_cuda();
  auto device = on_gpu ? writes[0].get_device() : 0;
  if (on_gpu) tvm_set_stream(kDLCUDA, device, c10::cuda::getCurrentCUDAStream(device).stream(), &original);
#endif
  TvmAny result{};
  int failed = tvm_call(function, arguments.data(), static_cast<int32_t>(arguments.size()), &result);
#ifdef ATTN_CORE_CUDA
  if (on_gpu) tvm_set_stream(kDLCUDA, device, original, nullptr);
#endif
  TORCH_CHECK(failed == 0, "the kernel ", kernel, " could not be launched");
}

// Delays the current stream of a tensor's GPU by about so many clock cycles; see current_gpu.py.
void pause_stream(const at::Tensor& tensor, int64_t cycles) {
#ifdef ATTN_CORE_CUDA
  if (tensor.is_cuda()) at::cuda::sleep(cycles);
#endif
}

void launch_nothing(c10::string_view, at::TensorList, at::TensorList) {}

void pause_nothing(const at::Tensor&, int64_t) {}

// What an argument is. A tensor is a place among the tensors of the run; a device is the run's own.
enum class Kind { kConstant, kTensor, kTensors, kOptionalTensors, kDevice };

struct Argument {
  Kind kind;
  c10::IValue constant;
  std::vector<int64_t> places;  // -1 is None
};

struct Result {
  int64_t place;  // -1: nobody reads it
  bool has_layout;
  std::vector<int64_t> sizes, strides;
};

struct Instruction {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<Result> results;
  std::vector<int64_t> last_uses;  // tensors that no later instruction reads
};

struct Program {
  int64_t places = 0;
  std::vector<Instruction> instructions;
};

// The programs of a text. A text has several if devices run other operators; then `of_device` has each device's program.
struct Programs {
  std::vector<Program> programs;
  std::unordered_map<int64_t, size_t> of_device;

  const Program& of(int64_t device) const {
    if (of_device.empty()) return programs.at(0);
    auto found = of_device.find(device);
    if (found == of_device.end())
      throw std::runtime_error("device " + std::to_string(device) +
                               " is none of those that this program was compiled for; compile it for the devices that it "
                               "runs on");
    return programs.at(found->second);
  }
};

std::mutex devices_mutex;
std::unordered_map<int64_t, int64_t> device_ids;  // JAX's numbers of this process's devices, by XLA's ordinals

int64_t device_id(int64_t ordinal) {
  std::lock_guard<std::mutex> lock(devices_mutex);
  auto found = device_ids.find(ordinal);
  return found == device_ids.end() ? ordinal : found->second;
}

std::vector<int64_t> numbers_of(const std::string& text) {
  std::vector<int64_t> numbers;
  std::istringstream words(text);
  std::string word;
  while (std::getline(words, word, ',')) numbers.push_back(std::stoll(word));
  return numbers;
}

c10::IValue scalar_of(char kind, const std::string& rest) {
  switch (kind) {
    case 'n': return c10::IValue();
    case 'i': return c10::IValue(static_cast<int64_t>(std::stoll(rest)));
    case 'f': return c10::IValue(std::stod(rest));
    case 'b': return c10::IValue(rest == "1");
    case 's': return c10::IValue(rest);
    case 'c': return c10::IValue(c10::Device(c10::kCPU));
    default: throw std::runtime_error("unknown word in the text of an operator");
  }
}

// Returns a number as a tensor that takes no part in the promotion of dtypes, as torch makes it of Python's numbers.
c10::IValue wrapped_number(const c10::IValue& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return c10::IValue(tensor);
}

Argument argument_of(const std::string& word, const c10::OperatorHandle& op, size_t number) {
  std::string rest = word.substr(1);
  switch (word[0]) {
    case 't': return {Kind::kTensor, {}, {std::stoll(rest)}};
    case 'd': return {Kind::kDevice, {}, {}};
    case 'u': return {Kind::kConstant, c10::IValue(at::Tensor()), {}};
    case 'w': return {Kind::kConstant, wrapped_number(scalar_of(rest.at(0), rest.substr(1))), {}};
    case 'I': return {Kind::kConstant, c10::IValue(numbers_of(rest)), {}};
    case 'B': {
      c10::List<bool> values;
      for (int64_t value : numbers_of(rest)) values.push_back(value != 0);
      return {Kind::kConstant, c10::IValue(values), {}};
    }
    case 'T': {
      auto type = op.schema().arguments().at(number).type();
      bool optional = type->cast<c10::ListType>() &&
                      type->cast<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType;
      return {optional ? Kind::kOptionalTensors : Kind::kTensors, {}, numbers_of(rest)};
    }
    default: return {Kind::kConstant, scalar_of(word[0], rest), {}};
  }
}

Result result_of(const std::string& word) {
  size_t first = word.find(':'), second = word.find(':', first + 1);
  Result result{std::stoll(word.substr(0, first)), first != std::string::npos, {}, {}};
  if (result.has_layout) {
    result.sizes = numbers_of(word.substr(first + 1, second - first - 1));
    result.strides = numbers_of(word.substr(second + 1));
  }
  return result;
}

// Returns the next program of a text, which ends at a line "---" or with the text.
Program parsed_program(std::istringstream& lines) {
  Program program;
  std::string line, word;
  std::getline(lines, line);
  program.places = std::stoll(line);
  while (std::getline(lines, line) && line != "---") {
    std::istringstream words(line);
    std::string name, overload;
    words >> name >> overload;
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload == "-" ? "" : overload.c_str());
    Instruction instruction{op, {}, {}, {}};
    while (words >> word && word != ">")
      instruction.arguments.push_back(argument_of(word, op, instruction.arguments.size()));
    if (instruction.arguments.size() != op.schema().arguments().size())
      throw std::runtime_error(name + " takes another number of arguments");
    while (words >> word && word != "~") instruction.results.push_back(result_of(word));
    while (words >> word) instruction.last_uses.push_back(std::stoll(word));
    program.instructions.push_back(std::move(instruction));
  }
  return program;
}

std::shared_ptr<const Programs> parsed(const std::string& text) {
  auto result = std::make_shared<Programs>();
  std::istringstream lines(text);
  if (text.rfind("devices", 0) == 0) {
    std::string line, word;
    std::getline(lines, line);
    std::istringstream words(line);
    words >> word;
    while (words >> word) {
      size_t colon = word.find(':');
      result->of_device[std::stoll(word.substr(0, colon))] = std::stoull(word.substr(colon + 1));
    }
  }
  while (lines.peek() != std::istringstream::traits_type::eof()) result->programs.push_back(parsed_program(lines));
  return result;
}

// Returns the parsed text. Texts are never forgotten: a process has as many as it has traced calls.
std::shared_ptr<const Programs> programs_of(std::string_view text) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Programs>>();
  std::string key(text);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(key);
  if (found == known->end()) found = known->emplace(key, parsed(key)).first;
  return found->second;
}

c10::IValue value_of(const Argument& argument, const std::vector<at::Tensor>& tensors, c10::Device device) {
  switch (argument.kind) {
    case Kind::kConstant: return argument.constant;
    case Kind::kDevice: return c10::IValue(device);
    case Kind::kTensor: return c10::IValue(tensors.at(argument.places[0]));
    case Kind::kTensors: {
      c10::List<at::Tensor> list;
      for (int64_t place : argument.places) list.push_back(tensors.at(place));
      return c10::IValue(list);
    }
    default: {
      c10::List<std::optional<at::Tensor>> list;
      for (int64_t place : argument.places)
        list.push_back(place < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(tensors.at(place)));
      return c10::IValue(list);
    }
  }
}

std::vector<int64_t> without_ones(c10::IntArrayRef sizes) {
  std::vector<int64_t> others;
  for (int64_t size : sizes)
    if (size != 1) others.push_back(size);
  return others;
}

// Returns a result in the layout that was recorded for it, because the operators after it were chosen for that layout.
at::Tensor as_recorded(at::Tensor tensor, const Result& result, const Instruction& instruction) {
  if (!result.has_layout) return tensor;
  if (tensor.sizes() != c10::IntArrayRef(result.sizes)) {
    if (without_ones(tensor.sizes()) != without_ones(result.sizes))
      throw std::runtime_error(instruction.op.schema().name() + " returned a result of another shape than expected");
    tensor = tensor.reshape(result.sizes);  // versions of torch differ in axes of length 1
  }
  bool equal = true;
  for (size_t axis = 0; axis < result.sizes.size(); ++axis)
    equal = equal && (result.sizes[axis] == 1 || tensor.stride(axis) == result.strides[axis]);
  if (equal || tensor.numel() == 0) return tensor;
  return at::empty_strided(result.sizes, result.strides, tensor.options()).copy_(tensor);
}

void run(const Program& program, std::vector<at::Tensor> tensors, c10::Device device) {
  // Neither autograd nor a mode of the calling thread takes part.
  c10::InferenceMode inference;
  c10::impl::ForceDispatchKeyGuard plain(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset | c10::default_excluded_set | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  tensors.resize(program.places);
  for (const Instruction& instruction : program.instructions) {
    torch::jit::Stack stack;
    stack.reserve(instruction.arguments.size());
    for (const Argument& argument : instruction.arguments) stack.push_back(value_of(argument, tensors, device));
    instruction.op.callBoxed(&stack);
    if (stack.size() == 1 && stack[0].isTensorList()) {  // an operator that returns a list
      auto list = stack[0].toTensorVector();
      stack.assign(list.begin(), list.end());
    }
    for (size_t i = 0; i < instruction.results.size(); ++i) {
      const Result& result = instruction.results[i];
      if (result.place >= 0) tensors.at(result.place) = as_recorded(stack.at(i).toTensor(), result, instruction);
    }
    for (int64_t place : instruction.last_uses) tensors.at(place) = at::Tensor();
  }
}

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

ffi::Error call(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view operators, int32_t ordinal,
                c10::Device device) {
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
    auto programs = programs_of(operators);
    run(programs->of(device_id(ordinal)), std::move(tensors), device);
  } catch (const c10::Error& error) {
    return ffi::Error::Internal(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error on_cpu(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view operators) {
  return call(args, rets, operators, ordinal, c10::Device(c10::kCPU));
}

#ifdef ATTN_CORE_CUDA
ffi::Error on_gpu(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  std::string_view operators) {
  auto device = static_cast<c10::DeviceIndex>(ordinal);
  c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device));
  return call(args, rets, operators, ordinal, c10::Device(c10::kCUDA, device));
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(attn_core_kernels, library) {
  library.def("launch(str kernel, Tensor[] reads, Tensor(a!)[] writes) -> ()");
  library.def("pause(Tensor(a!) tensor, int cycles) -> ()");
  for (auto device : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    library.impl("launch", device, TORCH_FN(launch));
    library.impl("pause", device, TORCH_FN(pause_stream));
  }
  // Tensors without memory, on which operator_recorder.py records.
  library.impl("launch", c10::DispatchKey::Meta, TORCH_FN(launch_nothing));
  library.impl("pause", c10::DispatchKey::Meta, TORCH_FN(pause_nothing));
}

// Sets JAX's number of a device of this process. Devices of other processes have other numbers.
extern "C" void attn_core_set_device(int64_t ordinal, int64_t id) {
  std::lock_guard<std::mutex> lock(devices_mutex);
  device_ids[ordinal] = id;
}

// Makes a function of TVM known by its name in XLA. The caller keeps the function alive.
extern "C" void attn_core_keep_kernel(const char* name, void* function, TvmCall call, TvmSetStream set_stream) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  tvm_call = call;
  tvm_set_stream = set_stream;
  kernels[name] = function;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_core_operator_cpu, on_cpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("operators"));

#ifdef ATTN_CORE_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_core_operator_gpu, on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("operators"));
#endif
