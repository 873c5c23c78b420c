// Makes a device the current one, for as long as it lives.
#pragma once

#include <cuda_runtime.h>

struct OnDevice {
  int before = -1, device;
  cudaError_t error;
  explicit OnDevice(int device) : device(device) {
    error = cudaGetDevice(&before);
    if (error == cudaSuccess && before != device) error = cudaSetDevice(device);
  }
  ~OnDevice() {
    if (before >= 0 && before != device) cudaSetDevice(before);
  }
  OnDevice(const OnDevice &) = delete;
};
