"""foretoken's own metrics inside vLLM: the accuracy of its forecasts, and the port with all."""
