// A device type "cuda" without CUDA, for fake tensors: a device guard, hooks, and one log.
//
// A build of torch for CUDA has its own guard and hooks. Its hooks have a lower priority than those of this file. Its
// guard replaces ours when torch is imported; fake_cuda_set_guard sets ours again.
//
// Streams and events are numbered. The log contains their calls in order, interleaved with the operators that Python
// records, so it shows which operations may overlap. A storage gets a number when Python first requests it; the log
// records when it is freed. Pinned memory is ordinary host memory whose address ranges are recorded.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace {

enum Kind : int64_t { OPERATOR, RECORD, WAIT, HOST_STREAM, HOST_EVENT, HOST_DEVICE, QUERY, MADE, FREE, KEEP };
using Entry = std::array<int64_t, 3>;

std::mutex guarded;
std::vector<Entry> entries;

void note(int64_t kind, int64_t first, int64_t second) {
  const std::lock_guard<std::mutex> lock(guarded);
  entries.push_back({kind, first, second});
}

constexpr int MOST_DEVICES = 8;
int num_devices = 1;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId stream_of[MOST_DEVICES] = {};
std::atomic<c10::StreamId> next_stream{1};
std::atomic<intptr_t> next_event{1};
std::atomic<int64_t> next_storage{1};

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current : device.index(); }
c10::Device cuda(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
int64_t number_of(const void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return cuda(current); }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index_of(device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "invalid device ordinal ", device.index());
    current = index_of(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current;
    setDevice(device);
    return cuda(before);
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(device)), stream_of[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, cuda(index_of(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(device)), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    stream_of[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    note(RECORD, number_of(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override { note(WAIT, number_of(event), stream.id()); }
  bool queryEvent(void* event) const override {
    note(QUERY, number_of(event), 0);
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { note(HOST_STREAM, stream.id(), 0); }
  void synchronizeEvent(void* event) const override { note(HOST_EVENT, number_of(event), 0); }
  void synchronizeDevice(const c10::DeviceIndex) const override { note(HOST_DEVICE, 0, 0); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // milliseconds
};

struct Pinned {
  size_t num_bytes;
  int64_t number;
};

std::map<const char*, Pinned> pinned;  // page-locked ranges by start address

void give_back(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(guarded);
    pinned.erase(static_cast<const char*>(memory));
  }
  c10::GetCPUAllocator()->raw_deallocate(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* const memory = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    const std::lock_guard<std::mutex> lock(guarded);
    if (memory) pinned[static_cast<const char*>(memory)] = {num_bytes, next_storage++};
    return {memory, memory, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t count) const override { default_copy_data(target, source, count); }
};

// Returns the number of the page-locked range that contains an address, or 0.
int64_t number_of_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(guarded);
  const auto wanted = static_cast<const char*>(address);
  auto behind = pinned.upper_bound(wanted);
  if (behind == pinned.begin()) return 0;
  --behind;
  return wanted < behind->first + behind->second.num_bytes ? behind->second.number : 0;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current;
    if (index >= 0) current = index;
    return before;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* address) const override { return number_of_pinned(address) != 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};

const Guard* const guard = new Guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, guard);

struct Name {
  int64_t number;
};

void forget(void* name) {
  note(FREE, static_cast<Name*>(name)->number, 0);
  delete static_cast<Name*>(name);
}

}  // namespace

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)  // torch uses this name
}

extern "C" {

void fake_cuda_set_guard() { const c10::impl::DeviceGuardImplRegistrar again(c10::DeviceType::CUDA, guard); }

void fake_cuda_set_devices(int number) { num_devices = number; }

void fake_cuda_note(int64_t kind, int64_t first, int64_t second) { note(kind, first, second); }

int64_t fake_cuda_stream() { return stream_of[current]; }

// Returns the number of a storage of a fake tensor, given UntypedStorage._cdata.
int64_t fake_cuda_storage(void* cdata) {
  auto* const storage = static_cast<c10::StorageImpl*>(cdata);
  if (storage->data_ptr().get_deleter() == &forget) return static_cast<Name*>(storage->data_ptr().get_context())->number;
  auto* const name = new Name{next_storage++};
  storage->set_data_ptr_noswap({nullptr, name, &forget, storage->device()});
  note(MADE, name->number, stream_of[current]);
  return name->number;
}

int64_t fake_cuda_pinned(const void* address) { return number_of_pinned(address); }

int64_t fake_cuda_length() {
  const std::lock_guard<std::mutex> lock(guarded);
  return static_cast<int64_t>(entries.size());
}

// Copies the log into rows of three numbers and empties it.
void fake_cuda_take(int64_t* rows) {
  const std::lock_guard<std::mutex> lock(guarded);
  for (const auto& entry : entries) rows = std::copy(entry.begin(), entry.end(), rows);
  entries.clear();
}
}
