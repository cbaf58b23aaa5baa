"""Adam whose state is kept in other forms than fp32."""
