// linear [STEPS]: a linear in FP8 by delayed scaling, trained on the CPU in C++; the loss of each step.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "te_core.hpp"

namespace {

// float32 of the host's, as a tensor.
struct Array {
    Array(int64_t rows, int64_t columns, float factor) : shape{rows, columns}, values(rows * columns) {
        for (size_t i = 0; i < values.size(); i++) values[i] = factor * static_cast<float>(static_cast<int>(i * 7 % 11) - 5);
        tensor = DLTensor{values.data(), {kDLCPU, 0}, 2, {2, 32, 1}, shape.data(), nullptr, 0};
    }
    std::vector<int64_t> shape;
    std::vector<float> values;
    DLTensor tensor;
};

void train(int steps) {
    te_runtime_options options = TE_RUNTIME_OPTIONS;
    options.device_type = kDLCPU;
    const te::Runtime runtime{options};
    const te::Layer layer{runtime, "linear", R"({"recipe": "DelayedScaling"})"};
    const te::Scaling scaling{layer};
    Array x{16, 32, 0.1F}, weight{8, 32, 0.02F}, y{16, 8, 0}, dy{16, 8, 0}, gradient{8, 32, 0};
    for (int i = 0; i < steps; i++) {
        const te::Saved kept = layer.forward({&x.tensor, &weight.tensor}, {&y.tensor}, &scaling);
        float loss = 0;
        for (size_t k = 0; k < y.values.size(); k++) {
            dy.values[k] = y.values[k] - 1;
            loss += dy.values[k] * dy.values[k] / 2;
        }
        std::printf("step %d loss %.4f\n", i, static_cast<double>(loss));
        layer.backward(kept, {&dy.tensor}, {nullptr, &gradient.tensor}, &scaling);  // that of x is not computed
        te::update(runtime, {&scaling});
        for (size_t k = 0; k < weight.values.size(); k++) weight.values[k] -= 0.005F * gradient.values[k];
    }
}

}  // namespace

int main(int count, char **words) {
    try {
        train(count > 1 ? std::atoi(words[1]) : 20);
    } catch (const te::Error &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
