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

// What a forward has kept for its backward.
class Saved {
   public:
    explicit Saved(te_saved *saved) : saved_(saved) {}
    Saved(Saved &&other) noexcept : saved_(std::exchange(other.saved_, nullptr)) {}
    Saved &operator=(Saved &&other) noexcept {
        std::swap(saved_, other.saved_);
        return *this;
    }
    ~Saved() { te_saved_free(saved_); }
    te_saved *get() const { return saved_; }

   private:
    te_saved *saved_;
};

class Scaling;

// A layer of te_core's, which an interpreter decides (te_core.h). It ends with its runtime, if not before.
class Layer {
   public:
    Layer(const Runtime &runtime, const std::string &name, const std::string &options = "{}") {
        check(te_layer_open(runtime.get(), name.c_str(), options.c_str(), &layer_));
    }
    Layer(Layer &&other) noexcept : layer_(std::exchange(other.layer_, nullptr)) {}
    Layer &operator=(Layer &&other) noexcept {
        std::swap(layer_, other.layer_);
        return *this;
    }
    ~Layer() { te_layer_free(layer_); }
    // Inputs, then outputs.
    std::vector<te_layer_slot> slots() const {
        const te_layer_slot *found = nullptr;
        int32_t inputs = 0, outputs = 0;
        check(te_layer_slots(layer_, &found, &inputs, &outputs));
        return {found, found + inputs + outputs};
    }
    Saved forward(const std::vector<DLTensor *> &inputs, const std::vector<DLTensor *> &outputs,
                  const Scaling *scaling = nullptr) const {
        te_saved *saved = nullptr;
        run(inputs, outputs, scaling, &saved);
        return Saved{saved};
    }
    // A forward that no backward follows.
    void infer(const std::vector<DLTensor *> &inputs, const std::vector<DLTensor *> &outputs,
               const Scaling *scaling = nullptr) const {
        run(inputs, outputs, scaling, nullptr);
    }
    // A gradient that is nullptr is not computed.
    void backward(const Saved &saved, const std::vector<DLTensor *> &of_outputs, const std::vector<DLTensor *> &gradients,
                  const Scaling *scaling = nullptr) const;
    void save(const std::string &path) const { check(te_layer_save(layer_, path.c_str())); }
    te_layer *get() const { return layer_; }

   private:
    void run(const std::vector<DLTensor *> &inputs, const std::vector<DLTensor *> &outputs, const Scaling *scaling,
             te_saved **saved) const;
    te_layer *layer_ = nullptr;
};

// Scales and maxima of a layer.
class Scaling {
   public:
    explicit Scaling(const Layer &layer) { check(te_scaling_create(layer.get(), &scaling_)); }
    Scaling(Scaling &&other) noexcept : scaling_(std::exchange(other.scaling_, nullptr)) {}
    Scaling &operator=(Scaling &&other) noexcept {
        std::swap(scaling_, other.scaling_);
        return *this;
    }
    ~Scaling() { te_scaling_free(scaling_); }
    te_scaling *get() const { return scaling_; }

   private:
    te_scaling *scaling_ = nullptr;
};

inline void Layer::run(const std::vector<DLTensor *> &inputs, const std::vector<DLTensor *> &outputs, const Scaling *scaling,
                       te_saved **saved) const {
    check(te_forward(layer_, scaling ? scaling->get() : nullptr, inputs.data(), static_cast<int32_t>(inputs.size()),
                     outputs.data(), static_cast<int32_t>(outputs.size()), saved));
}

inline void Layer::backward(const Saved &saved, const std::vector<DLTensor *> &of_outputs,
                            const std::vector<DLTensor *> &gradients, const Scaling *scaling) const {
    check(te_backward(layer_, scaling ? scaling->get() : nullptr, saved.get(), of_outputs.data(),
                      static_cast<int32_t>(of_outputs.size()), gradients.data(), static_cast<int32_t>(gradients.size())));
}

// The next scales of these.
inline void update(const Runtime &runtime, const std::vector<const Scaling *> &scalings) {
    std::vector<te_scaling *> given;
    for (const Scaling *one : scalings) given.push_back(one->get());
    check(te_scaling_update(runtime.get(), given.data(), static_cast<int32_t>(given.size())));
}

}  // namespace te

#endif
