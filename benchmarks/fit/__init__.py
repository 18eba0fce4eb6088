"""The fit of the package's cost models: sweeps of random calls, the models, and what a choice by them costs."""
