// te_core in C++17: what te_core.h has, with destructors and exceptions (docs/c.md).
#ifndef TE_CORE_HPP
#define TE_CORE_HPP

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "te_core.h"

namespace te {

// What te_error() says; what() is the whole sentence.
class Error : public std::runtime_error {
   public:
    explicit Error(const te_error_info &e)
        : std::runtime_error(e.message), status(e.status), step(e.step), got(e.got), to_do(e.to_do) {}
    te_status status;
    int step;
    std::string got, to_do;
};

inline void check(te_status status) {
    if (status != TE_OK) throw Error(*te_error());
}

class Runtime {
   public:
    explicit Runtime(const te_runtime_options &options) { check(te_runtime_create(&options, &runtime_)); }
    explicit Runtime(int device = 0, void *stream = nullptr) : Runtime(options(device, stream)) {}
    // `arena` has alloc(bytes, alignment, stream), which gives nullptr where nothing is left, and free(address, stream);
    // neither throws. It outlives the runtime.
    template <class Arena>
    Runtime(int device, void *stream, Arena &arena) : Runtime(with(options(device, stream), arena)) {}
    Runtime(const Runtime &) = delete;
    Runtime &operator=(const Runtime &) = delete;
    ~Runtime() { te_runtime_destroy(runtime_); }
    void synchronize(void *stream = nullptr) { check(te_synchronize(runtime_, stream)); }
    te_runtime *get() const { return runtime_; }

   private:
    static te_runtime_options options(int device, void *stream) {
        te_runtime_options o = TE_RUNTIME_OPTIONS;
        o.device_id = device;
        o.stream = stream;
        return o;
    }
    template <class Arena>
    static te_runtime_options with(te_runtime_options o, Arena &arena) {
        o.user = &arena;
        o.alloc = [](size_t bytes, size_t alignment, void *stream, void *user) -> void * {
            return static_cast<Arena *>(user)->alloc(bytes, alignment, stream);
        };
        o.free = [](void *address, void *stream, void *user) { static_cast<Arena *>(user)->free(address, stream); };
        return o;
    }
    te_runtime *runtime_ = nullptr;
};

// A call of a program. It must not outlive the program.
class Entry {
   public:
    Entry(te_program *program, int32_t number) : program_(program), number_(number) {}
    // Inputs and states, then outputs and saved tensors.
    std::vector<te_slot> slots() const {
        const te_slot *const *found = nullptr;
        int32_t inputs = 0, outputs = 0;
        check(te_program_slots(program_, number_, &found, &inputs, &outputs));
        std::vector<te_slot> made;
        for (int32_t i = 0; i < inputs + outputs; i++) made.push_back(*found[i]);
        return made;
    }
    size_t block_bytes() const {
        size_t bytes = 0;
        check(te_program_block_bytes(program_, number_, &bytes));
        return bytes;
    }
    void prepare(void *stream = nullptr) const { check(te_program_prepare(program_, number_, stream)); }
    void run(const std::vector<DLTensor *> &inputs, const std::vector<DLTensor *> &outputs, void *stream = nullptr,
             void *block = nullptr, size_t block_bytes = 0) const {
        te_run r = TE_RUN;
        r.entry = number_;
        r.inputs = static_cast<int32_t>(inputs.size());
        r.outputs = static_cast<int32_t>(outputs.size());
        r.input = inputs.data();
        r.output = outputs.data();
        r.stream = stream;
        r.block = block;
        r.block_bytes = block_bytes;
        check(te_program_run(program_, &r));
    }

   private:
    te_program *program_;
    int32_t number_;
};

// It must not outlive its runtime.
class Program {
   public:
    Program(const Runtime &runtime, const std::string &path) {
        check(te_program_load(runtime.get(), path.c_str(), &program_));
    }
    Program(const Runtime &runtime, const void *content, size_t bytes) {
        check(te_program_load_memory(runtime.get(), content, bytes, &program_));
    }
    Program(Program &&other) noexcept : program_(std::exchange(other.program_, nullptr)) {}
    Program &operator=(Program &&other) noexcept {
        std::swap(program_, other.program_);
        return *this;
    }
    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;
    ~Program() { te_program_free(program_); }
    std::vector<std::string> entries() const {
        const char *const *names = nullptr;
        int32_t count = 0;
        check(te_program_entries(program_, &names, &count));
        return {names, names + count};
    }
    Entry operator[](const std::string &name) const {
        int32_t number = 0;
        check(te_program_find(program_, name.c_str(), &number));
        return {program_, number};
    }
    te_program *get() const { return program_; }

   private:
    te_program *program_ = nullptr;
};

}  // namespace te

#endif
