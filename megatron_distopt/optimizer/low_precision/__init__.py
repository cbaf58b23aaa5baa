"""Adam with state that is stored in other forms than fp32."""
