"""Any torch module without a Megatron around it: `distribute(model, optimizer)`."""
