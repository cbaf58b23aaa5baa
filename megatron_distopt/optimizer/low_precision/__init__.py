"""Adam whose state is stored in other forms than fp32."""
