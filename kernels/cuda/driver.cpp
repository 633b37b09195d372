#include "driver.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "pearl/device/queue.hpp"
#include "pearl/errors.hpp"

namespace pearl::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <class Called>
void find(void* library, const char* name, Called& function) {
  void* const found = dlsym(library, name);
  if (found == nullptr)
    throw DeviceError(std::string("NVIDIA's driver (") + kLibrary + ") is too old for PEARL: it has no " + name +
                      ". Update it to release 525 or later.");
  function = reinterpret_cast<Called>(found);
}

Driver loaded() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw DeviceError(std::string("NVIDIA's driver is not installed: ") + kLibrary +
                      " cannot be loaded. `pearl devices` lists the usable devices.");
  Driver found{};
#define PEARL_FIND(name) find(library, #name, found.name)
  PEARL_FIND(cuInit);
  PEARL_FIND(cuDriverGetVersion);
  PEARL_FIND(cuGetErrorName);
  PEARL_FIND(cuGetErrorString);
  PEARL_FIND(cuDeviceGet);
  PEARL_FIND(cuDeviceGetCount);
  PEARL_FIND(cuDeviceGetName);
  PEARL_FIND(cuDeviceGetAttribute);
  PEARL_FIND(cuDevicePrimaryCtxRetain);
  PEARL_FIND(cuCtxPushCurrent_v2);
  PEARL_FIND(cuCtxPopCurrent_v2);
  PEARL_FIND(cuStreamCreate);
  PEARL_FIND(cuStreamDestroy_v2);
  PEARL_FIND(cuStreamSynchronize);
  PEARL_FIND(cuStreamBeginCapture_v2);
  PEARL_FIND(cuStreamEndCapture);
  PEARL_FIND(cuGraphInstantiateWithFlags);
  PEARL_FIND(cuGraphLaunch);
  PEARL_FIND(cuGraphExecDestroy);
  PEARL_FIND(cuGraphDestroy);
  PEARL_FIND(cuModuleLoadData);
  PEARL_FIND(cuModuleGetFunction);
  PEARL_FIND(cuFuncGetAttribute);
  PEARL_FIND(cuFuncSetAttribute);
  PEARL_FIND(cuLaunchKernelEx);
  PEARL_FIND(cuMemGetInfo_v2);
  PEARL_FIND(cuMemAlloc_v2);
  PEARL_FIND(cuMemAllocManaged);
  PEARL_FIND(cuMemHostAlloc);
  PEARL_FIND(cuMemFree_v2);
  PEARL_FIND(cuMemFreeHost);
  PEARL_FIND(cuMemcpyAsync);
  PEARL_FIND(cuMemsetD8Async);
  PEARL_FIND(cuPointerGetAttribute);
#undef PEARL_FIND
  const Result started = found.cuInit(0);
  if (started != 0)
    throw DeviceError("NVIDIA's driver does not start (cuInit returned " + std::to_string(started) +
                      "): no GPU is visible, or the driver and its kernel module do not fit together.");
  return found;
}

// The functions of libnvrtc, by its own names.
struct Compiler {
  using Program = struct ProgramState*;
  const char* (*nvrtcGetErrorString)(Result);
  Result (*nvrtcVersion)(int*, int*);
  Result (*nvrtcCreateProgram)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  Result (*nvrtcCompileProgram)(Program, int, const char* const*);
  Result (*nvrtcGetProgramLogSize)(Program, std::size_t*);
  Result (*nvrtcGetProgramLog)(Program, char*);
  Result (*nvrtcGetCUBINSize)(Program, std::size_t*);
  Result (*nvrtcGetCUBIN)(Program, char*);
  Result (*nvrtcDestroyProgram)(Program*);

  void require(Result result, const char* what) const {
    if (result != 0) throw DeviceError(std::string("NVRTC failed: ") + what + ": " + nvrtcGetErrorString(result) + ".");
  }
};

const Compiler& compiler(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, Compiler> loaded;
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(path);
  if (known != loaded.end()) return known->second;
  void* const library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw DeviceError("NVRTC, which compiles CUDA kernels, cannot be loaded" +
                      (path.empty() ? std::string() : " from " + path) +
                      ". PyPI's torch with CUDA brings it; without torch: pip install nvidia-cuda-nvrtc.");
  // NVRTC loads this library by its name alone, which does not say where it is.
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), ignored))
    if (entry.path().filename().string().starts_with("libnvrtc-builtins.so."))
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  Compiler found{};
#define PEARL_FIND(name) \
  if (void* const at = dlsym(library, #name); at != nullptr) \
    found.name = reinterpret_cast<decltype(found.name)>(at); \
  else \
    throw DeviceError("NVRTC in " + path + " is too old: it has no " #name ".")
  PEARL_FIND(nvrtcGetErrorString);
  PEARL_FIND(nvrtcVersion);
  PEARL_FIND(nvrtcCreateProgram);
  PEARL_FIND(nvrtcCompileProgram);
  PEARL_FIND(nvrtcGetProgramLogSize);
  PEARL_FIND(nvrtcGetProgramLog);
  PEARL_FIND(nvrtcGetCUBINSize);
  PEARL_FIND(nvrtcGetCUBIN);
  PEARL_FIND(nvrtcDestroyProgram);
#undef PEARL_FIND
  return loaded.emplace(path, found).first->second;
}

}  // namespace

const Driver& driver() {
  static const Driver driver = loaded();  // a failure is not kept: the next call tries again
  return driver;
}

void check(Result result, const char* what, const std::string& device) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  throw DeviceError("The device " + device + " failed: " + what + ": " + (name != nullptr ? name : "unknown error") +
                    (text != nullptr ? std::string(" (") + text + ")" : "") +
                    ". If it was lost or reset, start again; `pearl devices` lists the usable devices.");
}

std::vector<char> compiled(const std::string& library, const std::string& name, const std::string& text,
                           const std::vector<Header>& headers, int major, int minor,
                           const std::vector<std::string>& options) {
  const Compiler& nvrtc = compiler(library);
  std::vector<const char*> texts, names;
  for (const Header& header : headers) {
    texts.push_back(header.text.c_str());
    names.push_back(header.name.c_str());
  }
  struct Owned {
    const Compiler& nvrtc;
    Compiler::Program program = nullptr;
    ~Owned() { nvrtc.nvrtcDestroyProgram(&program); }
  } owned{nvrtc};
  nvrtc.require(nvrtc.nvrtcCreateProgram(&owned.program, text.c_str(), name.c_str(), static_cast<int>(headers.size()),
                                         texts.data(), names.data()),
                "the source cannot be read");
  const std::string architecture = "--gpu-architecture=sm_" + std::to_string(major) + std::to_string(minor);
  std::vector<const char*> given{architecture.c_str(), "--std=c++20",
                                 "--device-as-default-execution-space"};
  for (const std::string& option : options) given.push_back(option.c_str());
  const Result result = nvrtc.nvrtcCompileProgram(owned.program, static_cast<int>(given.size()), given.data());
  if (result != 0) {
    std::size_t size = 0;
    nvrtc.nvrtcGetProgramLogSize(owned.program, &size);
    std::string log(size, '\0');
    nvrtc.nvrtcGetProgramLog(owned.program, log.data());
    while (!log.empty() && log.back() == '\0') log.pop_back();
    throw DeviceError("The kernels of " + name + " do not compile for compute capability " + std::to_string(major) + "." +
                      std::to_string(minor) + " with NVRTC " + compiler_version(library) + " (" +
                      nvrtc.nvrtcGetErrorString(result) + ").\n" + device::shortened(log));
  }
  std::size_t size = 0;
  nvrtc.require(nvrtc.nvrtcGetCUBINSize(owned.program, &size), "it made no binary");
  std::vector<char> binary(size);
  nvrtc.require(nvrtc.nvrtcGetCUBIN(owned.program, binary.data()), "its binary cannot be read");
  return binary;
}

std::string compiler_version(const std::string& library) {
  int major = 0, minor = 0;
  const Compiler& nvrtc = compiler(library);
  nvrtc.require(nvrtc.nvrtcVersion(&major, &minor), "its version is not known");
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace pearl::cuda
